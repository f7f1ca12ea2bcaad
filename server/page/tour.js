// Three demonstrations. Each sends real requests and explains, line by line, the events that the map shows.

import { ApiError, postStream } from "./api.js";
import { $, count, element, seconds } from "./dom.js";
import { claim, copyReason } from "./memory.js";

const STORY = "Tell me a long story about a fox and a lighthouse, and about the friends that they meet on their way.";
const MAX_STREAMS = 64;
const LAST_POLLS = 20; // for the last steps: the log of a fast server may have lost some
// A system prompt long enough that the time to compute it is noticeable; with a small context, the sentences that fit.
const FOX = [
  "The fox lives under a lighthouse by the sea, with an old owl, two mice and a lamp that never sleeps.",
  "In winter the boats come home late, and the fox counts them one by one.",
  "The owl has read every book in the lighthouse twice, but it still asks the fox about the weather.",
  "The two mice bake bread on Mondays and sell it to the fishermen for a button or a shiny shell.",
  "Once a year a whale comes by, sings under the window until the morning, and goes away again.",
  "The fox is afraid of thunder, of the dark cellar and of nothing else in the world.",
  "When somebody is lost in the fog, the fox rings the bell, and the owl flies out to look.",
  "The lamp has a name, too, but only the oldest of the fishermen remembers what it is.",
  "In summer there are strawberries behind the house, and everybody pretends not to have eaten them.",
  "On the stairs, which have ninety-nine steps, the mice have painted one picture for every storm.",
  "The sea took the little bridge away three times, and three times the fox and its friends built it again.",
  "At night they all sit beside the stove, and whoever tells the best story may stay up longest.",
];

// The text beside the map: each line once, in the order of the events.
class Callout {
  #said = new Set();

  constructor(title, signal) {
    this.signal = signal;
    $("callout-title").textContent = title;
    $("callout-steps").replaceChildren();
    $("callout").hidden = false;
  }

  say(key, ...text) {
    if (this.#said.has(key) || this.signal.aborted) return;
    this.#said.add(key);
    const line = element("li", {}, ...text);
    $("callout-steps").append(line);
    line.scrollIntoView({ block: "nearest" });
  }
}

// Finds the copy-on-write of the block in which the prompt of two samples ends, among the copies that prompts found in
// the prefix cache and other clients' requests may get.
class PromptCopy {
  #copies = [];
  #ends = new Set(); // the blocks in which the prompt ends, in the tables of both samples

  addSteps(steps) {
    for (const step of steps) {
      const [reason, numDecodes] = [copyReason(step), step.num_decodes];
      if (reason === "prefix") continue;
      this.#copies.push(...step.copies.map(([source, target]) => ({ source, target, reason, numDecodes })));
    }
  }

  addTables(samples, blockSize) {
    for (const { blocks, num_prompt_tokens } of samples) {
      const end = blocks[Math.floor(num_prompt_tokens / blockSize)];
      if (end != null && num_prompt_tokens % blockSize) this.#ends.add(end);
    }
  }

  // {source, target}, or undefined if the copy was not seen.
  find() {
    const surely = (fits) => this.#copies.find((copy) => copy.reason === "fork" && fits(copy));
    if (!this.#ends.size) return surely(({ numDecodes }) => numDecodes === 2); // no snapshot had the two samples
    const held = this.#copies.find(({ source }) => this.#ends.has(source));
    return held ?? surely(({ target }) => this.#ends.has(target)); // the sample that kept the source may end early
  }
}

export class Tour {
  #abort = null;

  constructor({ chat, monitor }) {
    Object.assign(this, { chat, monitor });
    const tours = {
      samples: (signal) => this.#samples(new Callout("One prompt, two samples", signal)),
      repeat: (signal) => this.#repeat(new Callout("The same prompt, twice", signal)),
      fill: (signal) => this.#fill(new Callout("More than fits", signal)),
    };
    for (const button of $("tour").querySelectorAll("[data-tour]")) {
      button.addEventListener("click", () => this.#start(tours[button.dataset.tour]));
    }
    $("callout-close").addEventListener("click", () => this.#close());
  }

  #start(tour) {
    this.#close();
    this.#abort = new AbortController();
    return tour(this.#abort.signal);
  }

  #close() {
    if (this.#abort) this.chat.stop();
    this.#abort?.abort();
    this.#abort = null;
    $("callout").hidden = true;
  }

  // Watches snapshots and steps until `work` is done and its steps are seen, which sampled `tokensOf(result)` tokens. An
  // answer may be faster than the polls, and the server may answer a poll with a view that it made earlier.
  async #watch(work, tokensOf, onSnapshot, onSteps) {
    const seen = [];
    const sampled = () => seen.reduce((sum, step) => sum + step.num_sampled, 0);
    const snapshot = ({ detail }) => onSnapshot(detail.snapshot);
    const steps = ({ detail }) => {
      seen.push(...detail);
      onSteps(detail);
    };
    this.monitor.addEventListener("snapshot", snapshot);
    this.monitor.addEventListener("steps", steps);
    try {
      const result = await work;
      const tokens = tokensOf(result);
      for (let polls = 0; polls < LAST_POLLS && sampled() < tokens; polls++) await this.monitor.nextPoll();
      return result;
    } finally {
      this.monitor.removeEventListener("snapshot", snapshot);
      this.monitor.removeEventListener("steps", steps);
    }
  }

  async #samples(callout) {
    this.chat.reset();
    callout.say("sent", "One request with n = 2. Its prompt is computed once, for both.");
    const work = this.chat.send(STORY, { n: 2, temperature: 0.8, max_tokens: 600 });
    const copy = new PromptCopy(); // explained after the shared blocks, from which it follows
    const sayCopy = () => {
      const found = copy.find();
      if (!found) return;
      const text = `Copy-on-write: the prompt's last block, ${found.source}, was not full. The first sample to write to `;
      callout.say("copied", text, `it got a copy, block ${found.target}, so that the other sample sees no foreign word.`);
    };
    const answer = await this.#watch(
      work,
      ({ usage }) => usage?.completion_tokens ?? 0,
      (snapshot) => {
        const samples = snapshot.sequences.filter((sequence) => sequence.request_id === `${this.chat.answer?.id}-0`);
        copy.addTables(samples, snapshot.blockSize);
        if (samples.length < 2) return;
        const shared = samples[0].blocks.filter((block) => samples[1].blocks.includes(block));
        if (!shared.length) return;
        const blocks = shared.length > 1 ? `Blocks ${shared.join(", ")} are` : `Block ${shared[0]} is`;
        callout.say("shared", `${blocks} in both tables: ref count 2. Two answers, one copy of the prompt.`);
        sayCopy();
        callout.say("grow", "Every block after that is A's or B's alone, and is taken only when the one before is full.");
      },
      (steps) => copy.addSteps(steps),
    );
    if (answer.failed) return;
    sayCopy();
    const inLastBlock = answer.usage?.prompt_tokens % this.#snapshot?.blockSize;
    if (inLastBlock === 0) {
      callout.say("copied", "No copy was needed: the prompt ended just where a block did, and full blocks are only read.");
    } else if (inLastBlock) {
      const text = "The prompt's last block was not full, so the first sample to write to it gets a copy. ";
      callout.say("copied", text, "This time the picture came too late to show it.");
    }
    const blocks = "Both are done and let go of their blocks. Full ones keep their content: cached, until space is needed.";
    callout.say("done", blocks, " Pause, and pull the slider back, to see it again slowly.");
  }

  async #repeat(callout) {
    const name = ["Amber", "Basil", "Clover", "Dusk", "Ember", "Flint"][Math.floor(Math.random() * 6)];
    const room = Math.min(this.chat.maxTokens ?? Infinity, this.#capacity()) - 400; // a character is at most one token
    const sentences = FOX.slice(0, Math.max(2, Math.floor(room / 100)));
    const system = `${name} ${100 + Math.floor(Math.random() * 900)} is the name of a young fox. ${sentences.join(" ")}
      You tell stories about the fox and its friends. Your stories are short and kind, and they end well.`;
    callout.say("sent", "A long system prompt, a short question, asked in two conversations one after the other.");
    const first = await this.#ask(system);
    if (first.failed) return;
    callout.say("first", `First time: ${this.#cost(first)} Its full blocks stay behind as cached ones.`);
    const second = await this.#ask(system);
    if (second.failed) return;
    const cached = second.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    callout.say("second", `Second time: ${this.#cost(second)}`);
    if (!cached) return callout.say("none", "No cached block was found: is prefix caching on in this server?");
    const blocks =
      "Those blocks were found again by a hash of all tokens up to their end, and taken over (the green flash).";
    const inNext = cached % this.#snapshot?.blockSize;
    const next = inNext ? ` The other ${inNext} tokens are the start of one more block.` : "";
    callout.say("why", blocks, next, " The last token is always computed, because the answer follows from it.");
  }

  get #snapshot() {
    return this.monitor.history.at(-1)?.snapshot;
  }

  // Capacity of the memory, in tokens.
  #capacity() {
    const snapshot = this.#snapshot;
    return snapshot ? snapshot.numBlocks * snapshot.blockSize : Infinity;
  }

  async #ask(system) {
    this.chat.reset();
    return this.chat.send("Tell me a story about a fox.", { system, n: 1, max_tokens: 96 });
  }

  #cost({ usage, ttft }) {
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const of = `${count(usage?.prompt_tokens ?? 0)} prompt tokens`;
    return `${cached ? `${count(cached)} of ${of} came from the cache` : `${of} were computed`}, first token after ${seconds(ttft)}.`;
  }

  async #fill(callout) {
    const { signal } = callout;
    if (!this.chat.model) await this.chat.findModel();
    const snapshot = this.#snapshot;
    if (!snapshot) return callout.say("none", "There is no picture of the memory yet.");
    const { blockSize, numBlocks } = snapshot;
    const wanted = 1.6 * numBlocks * blockSize;
    const longest = Math.min(this.chat.maxTokens - 64, 1024);
    const streams = Math.min(MAX_STREAMS, Math.max(8, Math.ceil(wanted / 512)));
    const tokens = Math.max(32, Math.min(longest, Math.ceil(wanted / streams)));
    callout.say("sent", `${streams} stories at once, of ${count(tokens)} tokens each: all in one batch, one token per step.`);
    if (streams * tokens < numBlocks * blockSize) {
      const share = Math.round((100 * streams * tokens) / (numBlocks * blockSize));
      const text = `This memory has ${count(numBlocks)} blocks, so that fills ${share || "less than 1"} % of it. Start the server with `;
      callout.say("large", text, element("code", {}, "--num-blocks 512"), " to see it run full.");
    }
    const totals = { evicted: 0, preempted: 0 };
    try {
      const stories = this.#stories(streams, tokens, signal);
      await this.#watch(stories, () => streams * tokens, () => {}, (steps) => sayPressure(callout, steps, totals));
      callout.say("done", `Done: ${count(totals.evicted)} blocks evicted, ${count(totals.preempted)} preemptions, every story complete.`);
    } catch (error) {
      if (!signal.aborted) callout.say("failed", error instanceof ApiError ? error.message : String(error));
    }
  }

  #stories(streams, tokens, signal) {
    const heroes = ["fox", "owl", "bear", "mouse", "robot", "girl", "boy", "whale"];
    const prompt = Array.from(
      { length: streams },
      (_, i) => `Once upon a time, in house number ${i + 1}, there lived a ${heroes[i % heroes.length]} who`,
    );
    const body = { model: this.chat.model, prompt, max_tokens: tokens, ignore_eos: true, temperature: 0.8, stream: true };
    let claimed = false;
    this.monitor.wake();
    return postStream("v1/completions", body, signal, (event) => {
      if (claimed) return;
      claimed = true;
      prompt.forEach((_, i) => claim(`${event.id}-${i}`, `story ${i + 1}`, i));
    });
  }
}

function sayPressure(callout, steps, totals) {
  for (const step of steps) {
    totals.evicted += step.num_evicted;
    totals.preempted += step.num_preempted;
    if (step.num_evicted) {
      callout.say("evicted", "No empty block is left: the cached ones that were used least recently are evicted.");
    }
    if (step.num_preempted) {
      const text = "Now every block is in use. The newest story gives up its blocks and waits in the queue; ";
      callout.say("preempted", text, "it is computed again when there is room, word for word.");
    }
  }
}
