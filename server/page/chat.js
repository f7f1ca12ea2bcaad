// The conversation: sends messages, streams answers, stops them; one request at a time.

import { ApiError, postStream } from "./api.js";
import { Answer } from "./answer.js";
import { $, announce, element } from "./dom.js";
import { claim } from "./memory.js";

export class Chat {
  model = null;
  answer = null; // the last answer
  #messages = [];
  #abort = null;
  #queue = Promise.resolve();

  constructor({ parameters, monitor, onMark, onFirst, askKey, findModel }) {
    Object.assign(this, { parameters, monitor, onMark, onFirst, askKey, findModel });
    this.list = $("messages");
    this.prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    this.prompt.addEventListener("input", () => this.#grow());
    $("stop").addEventListener("click", () => this.stop());
    $("new-chat").addEventListener("click", () => this.reset());
    for (const button of $("suggestions").querySelectorAll("button")) {
      button.addEventListener("click", () => this.send(button.textContent));
    }
    monitor.addEventListener("snapshot", ({ detail }) => this.#showTables(detail.snapshot));
  }

  get busy() {
    return this.#abort !== null;
  }

  stop() {
    this.#abort?.abort();
  }

  reset() {
    this.stop();
    this.#messages = [];
    this.answer = null;
    this.list.replaceChildren($("welcome") ?? this.welcome);
    this.list.firstChild.hidden = false;
    if (matchMedia("(hover: hover)").matches) this.prompt.focus(); // else a phone would open its keyboard
  }

  async #submit() {
    const text = this.prompt.value.trim();
    if (!text) return this.prompt.focus();
    if (this.busy) return;
    this.prompt.value = "";
    this.#grow();
    const answer = await this.send(text);
    if (answer.failed && !answer.samples.some((sample) => sample.text)) this.#giveBack(text);
  }

  // Puts an unanswered message back into the prompt field, unless the visitor has written something since.
  #giveBack(text) {
    if (this.prompt.value) return;
    this.prompt.value = text;
    this.#grow();
  }

  #grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight + 2, 180)}px`;
  }

  // Sends a message. `overrides` replace parameters (`system` too). Resolves to the complete Answer.
  send(text, overrides = {}) {
    this.#queue = this.#queue.then(() => this.#send(text, overrides));
    return this.#queue;
  }

  async #send(text, overrides) {
    if (!this.model) await this.findModel();
    const messages = this.#messages;
    const { system = this.parameters.system, ...fields } = overrides;
    const turn = { role: "user", content: text };
    const body = {
      model: this.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, turn],
      stream: true,
      stream_options: { include_usage: true },
      ...this.parameters.request(),
      ...fields,
    };
    const reply = { role: "assistant", content: "" };
    const onChoose = (content) => (reply.content = content);
    const answer = (this.answer = new Answer(body.n ?? 1, { onMark: this.onMark, onChoose }));
    this.welcome ??= $("welcome");
    this.welcome.remove();
    this.list.append(element("article", { class: "question", "aria-label": "You" }, text), answer.node);
    this.#scroll(true);
    this.#setBusy(new AbortController());
    const outcome = await this.#stream(body, answer);
    answer.end(...outcome);
    reply.content = answer.samples[answer.chosen].text;
    if (reply.content) messages.push(turn, reply);
    this.#setBusy(null);
    this.#scroll();
    announce(outcome[1] ?? "The answer is complete.");
    return answer;
  }

  // Returns how the request ended: [finish reason, error text].
  async #stream(body, answer, mayAsk = true) {
    const { signal } = this.#abort;
    if (!this.model) return ["error", "The server has not said which model it serves. Is it ready, and the key right?"];
    try {
      await postStream("v1/chat/completions", body, signal, (event) => {
        if (!answer.id) claim(`${(answer.id = event.id)}-0`, "your message");
        const waited = answer.ttft == null;
        answer.addEvent(event);
        if (waited && answer.ttft != null) this.onFirst(answer);
        this.#scroll();
      });
      return ["stop"];
    } catch (error) {
      if (signal.aborted) return ["abort"];
      const needsKey = error instanceof ApiError && error.status === 401;
      if (needsKey && mayAsk && (await this.askKey("The server did not accept this key.", true))) {
        return this.#stream({ ...body, model: this.model }, answer, false);
      }
      return ["error", error instanceof ApiError ? error.message : "The server cannot be reached. Is it running?"];
    }
  }

  #setBusy(abort) {
    this.#abort = abort;
    this.monitor.busy = this.busy;
    this.monitor.wake();
    $("send").hidden = this.busy;
    $("stop").hidden = !this.busy;
  }

  // Scrolls to the end of the text, unless the visitor has scrolled away from it.
  #scroll(force = false) {
    const { list } = this;
    if (force || list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
  }

  #showTables(snapshot) {
    if (!this.answer?.id) return;
    const mine = snapshot.sequences.filter((sequence) => sequence.request_id === `${this.answer.id}-0`);
    this.answer.showTables(snapshot, mine);
  }
}
