// The npm client of OpenAI against a live server with the bundled model: node --test tests/clients/check_node.mjs
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const { OpenAI } = createRequire(process.env.CLIENTS_NODE_FOLDER + "/")("openai");
const { CLIENTS_URL: baseURL, CLIENTS_KEY: apiKey, CLIENTS_LIMITED_KEY, CLIENTS_MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const base = { model, messages, max_tokens: 12, temperature: 0 };
const colour = {
  type: "object",
  properties: { fox: { enum: ["red", "grey"] } },
  required: ["fox"],
  additionalProperties: false,
};
const response_format = { type: "json_schema", json_schema: { name: "colour", schema: colour, strict: true } };

const chat = (fields = {}) => client.chat.completions.create({ ...base, ...fields });

async function collect(stream) {
  const found = { texts: {}, usage: null, finish: {}, chunks: 0 };
  for await (const chunk of stream) {
    found.chunks += 1;
    found.usage = chunk.usage ?? found.usage;
    for (const { index, delta, finish_reason } of chunk.choices) {
      found.texts[index] = (found.texts[index] ?? "") + (delta.content ?? "");
      found.finish[index] = finish_reason ?? found.finish[index];
    }
  }
  return found;
}

test("chat", async () => {
  const answer = await chat();
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.equal(answer.choices[0].message.refusal, null);
  assert.equal(answer.usage.completion_tokens, 12);
  assert.ok(answer._request_id);
});

for (const n of [1, 3]) {
  test(`a stream of ${n} says what the answer says, with usage`, async () => {
    const whole = await chat({ n });
    const found = await collect(await chat({ n, stream: true, stream_options: { include_usage: true } }));
    assert.deepEqual(Object.values(found.texts), whole.choices.map((choice) => choice.message.content));
    assert.equal(found.usage.completion_tokens, 12 * n);
    assert.deepEqual(new Set(Object.values(found.finish)), new Set(["length"]));
  });
}

test("stop", async () => {
  const said = (await chat()).choices[0].message.content;
  const stop = said.slice(4, 7);
  const answer = await chat({ stop });
  assert.equal(answer.choices[0].message.content, said.slice(0, said.indexOf(stop)));
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("logprobs", async () => {
  const { message, logprobs } = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0];
  const bytes = logprobs.content.flatMap((entry) => entry.bytes);
  assert.equal(new TextDecoder().decode(new Uint8Array(bytes)), message.content);
  assert.ok(logprobs.content.every((entry) => entry.top_logprobs.length === 2));
});

test("the stream helper", async () => {
  const runner = client.chat.completions.stream({ ...base });
  let deltas = "";
  runner.on("content", (delta) => (deltas += delta));
  const final = await runner.finalChatCompletion();
  assert.equal(deltas, final.choices[0].message.content);
});

test("parse", async () => {
  const answer = await client.chat.completions.parse({ ...base, response_format, max_tokens: 60 });
  assert.ok(["red", "grey"].includes(JSON.parse(answer.choices[0].message.content).fox));
});

test("tools", async () => {
  const tools = [{ type: "function", function: { name: "paint", parameters: colour } }];
  const answer = await chat({ tools, tool_choice: "required", max_tokens: 80 });
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "paint");
  assert.ok(JSON.parse(call.function.arguments).fox);
});

for (const stream of [false, true]) {
  test(`tools that the client runs, ${stream ? "" : "not "}streamed`, async () => {
    const seen = [];
    const paint = ({ fox }) => (seen.push(fox), "painted");
    const run = { name: "paint", parameters: colour, parse: JSON.parse, function: paint };
    const tools = [{ type: "function", function: run }];
    const rest = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 80, stream };
    const runner = client.chat.completions.runTools({ ...base, ...rest }, { maxChatCompletions: 2 });
    await runner.done();
    assert.ok(seen.length >= 1 && seen.every((fox) => ["red", "grey"].includes(fox)));
    assert.ok(runner.messages.some((message) => message.role === "tool" && message.content === "painted"));
  });
}

test("the stream helper of responses", async () => {
  const text = { format: { type: "json_schema", name: "colour", schema: colour, strict: true } };
  const stream = client.responses.stream({ model, input: messages, max_output_tokens: 60, text });
  const types = [];
  for await (const event of stream) types.push(event.type);
  assert.deepEqual([types[0], types.at(-1)], ["response.created", "response.completed"]);
  assert.ok(["red", "grey"].includes(JSON.parse((await stream.finalResponse()).output_text).fox));
});

test("completions, and a stream of them", async () => {
  const body = { model, prompt: ["One", "Two"], max_tokens: 5, temperature: 0, echo: true, logprobs: 1 };
  const whole = await client.completions.create(body);
  assert.deepEqual(whole.choices.map((choice) => choice.index), [0, 1]);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
});

test("embeddings, whose base64 the client decodes", async () => {
  const float = await client.embeddings.create({ model, input: ["A fox.", "A hen."], encoding_format: "float" });
  const decoded = await client.embeddings.create({ model, input: ["A fox.", "A hen."] });
  // Unit vectors of one text: they differ by the last bits of bf16, because the prefix cache has it the second time.
  decoded.data.forEach((row, i) => {
    const product = row.embedding.reduce((sum, value, j) => sum + value * float.data[i].embedding[j], 0);
    assert.ok(Math.abs(product - 1) < 1e-3, `${product}`);
  });
});

test("models", async () => {
  const ids = [];
  for await (const found of await client.models.list()) ids.push(found.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

for (const [fields, status, param] of [
  [{ temperature: 3 }, 400, "temperature"],
  [{ n: 0 }, 400, "n"],
  [{ model: "gpt-4o" }, 404, "model"],
  [{ messages: [] }, 400, "messages"],
  [{ temperature: 3, stream: true }, 400, "temperature"],
]) {
  test(`an error for ${JSON.stringify(fields)}`, async () => {
    const error = await chat(fields).then(() => assert.fail("no error"), (caught) => caught);
    assert.ok(error instanceof (status === 404 ? OpenAI.NotFoundError : OpenAI.BadRequestError));
    assert.deepEqual([error.status, error.param, error.type], [status, param, "invalid_request_error"]);
    assert.ok(error.requestID && !error.message.includes("no body"));
  });
}

test("a wrong key", async () => {
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
});

test("retries wait for Retry-After", async () => {
  const limited = client.withOptions({ apiKey: CLIENTS_LIMITED_KEY });
  const body = { model, prompt: "Once", max_tokens: 1 };
  let error = null;
  for (let i = 0; i < 200 && error === null; i++) {
    await limited.completions.create(body).catch((caught) => (error = caught));
  }
  assert.ok(error instanceof OpenAI.RateLimitError);
  assert.ok(Number(error.headers.get("retry-after")) >= 1);
  let waited = 0;
  for (let i = 0; i < 5 && waited < 900; i++) { // a second may just have ended
    const start = Date.now();
    assert.ok((await limited.completions.create(body, { maxRetries: 3 })).choices[0]);
    waited = Date.now() - start;
  }
  assert.ok(waited >= 900);
});

test("a timeout", async () => {
  const body = { model, prompt: "Once", max_tokens: 1500, ignore_eos: true };
  await assert.rejects(client.completions.create(body, { timeout: 20 }), OpenAI.APIConnectionTimeoutError);
});

test("a stream that is aborted", async () => {
  const stream = await chat({ stream: true, max_tokens: 1500, ignore_eos: true });
  let chunks = 0;
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    if (++chunks === 3) stream.controller.abort();
  }
  assert.ok(chunks < 1500);
});

test("many at once", async () => {
  const texts = await Promise.all(
    Array.from({ length: 12 }, (_, i) => i % 2 ? chat().then((a) => a.choices[0].message.content)
      : chat({ stream: true }).then(collect).then((found) => found.texts[0])));
  assert.equal(new Set(texts).size, 1);
});
