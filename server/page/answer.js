// One answer on the page: a card per sample, side by side, with the sample's text and block table.

import { count, element, formatted, letter, seconds } from "./dom.js";
import { OWN_COLOURS } from "./theme.js";

const MAX_CHIPS = 96;
const REASONS = { stop: "finished", length: "max tokens reached", abort: "stopped", error: "failed" };

export class Answer {
  usage = null;
  chosen = 0;

  constructor(n, { onMark, onChoose }) {
    this.onMark = onMark;
    this.onChoose = onChoose;
    this.started = performance.now();
    this.samples = Array.from({ length: n }, (_, index) => this.#sample(index, n > 1));
    this.note = element("p", { class: "note" });
    this.node = element(
      "article",
      { class: "answer", "aria-label": "Answer", "aria-busy": "true" },
      element("div", { class: n > 1 ? "samples several" : "samples" }, ...this.samples.map((sample) => sample.card)),
      this.note,
    );
    if (n > 1) this.choose(0);
  }

  #sample(index, several) {
    const name = letter(index);
    const scrollable = { tabindex: "0", role: "group", "aria-label": `Text of sample ${name}` };
    const body = element("div", { class: "text streaming", ...(several && scrollable) });
    const chips = element("ol", { class: "table", "aria-label": `Block table of sample ${name}` });
    const meta = element("span", { class: "muted" });
    const colour = { "data-colour": index % OWN_COLOURS };
    const button = { type: "button", title: "Continue the chat from this sample", "aria-label": `Sample ${name}: continue from it` };
    const badge = element(several ? "button" : "span", { class: "badge", ...colour, ...(several && button) }, name);
    if (several) badge.addEventListener("click", () => this.choose(index));
    const card = element("section", { class: "sample", ...colour },
      element("header", {}, badge, meta), body, chips); // prettier-ignore
    const mark = ({ target }) => "block" in target.dataset && this.onMark(Number(target.dataset.block), index);
    chips.addEventListener("pointerover", mark);
    chips.addEventListener("pointerdown", mark);
    chips.addEventListener("pointerleave", () => this.onMark(null));
    return { index, body, chips, meta, badge, card, text: "", tokens: [], reason: null, shown: "" };
  }

  choose(index) {
    this.chosen = index;
    for (const sample of this.samples) {
      sample.badge.setAttribute("aria-pressed", String(sample.index === index));
      sample.card.classList.toggle("chosen", this.samples.length > 1 && sample.index === index);
    }
    this.onChoose?.(this.samples[index].text);
  }

  addEvent(event) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices) {
      const sample = this.samples[choice.index];
      const text = choice.delta.content ?? "";
      const { body } = sample;
      const follows = body.scrollHeight - body.scrollTop - body.clientHeight < 40;
      if (text && this.ttft == null) this.ttft = (performance.now() - this.started) / 1000;
      sample.text += text;
      if (choice.logprobs?.content) {
        sample.tokens.push(...choice.logprobs.content);
        sample.body.append(...choice.logprobs.content.map(shaded));
      } else if (text) sample.body.append(text);
      if (follows) body.scrollTop = body.scrollHeight;
      if (choice.finish_reason) this.#finish(sample, choice.finish_reason);
    }
  }

  #finish(sample, reason) {
    sample.reason = reason;
    sample.body.classList.remove("streaming");
    sample.chips.classList.add("released");
    const blocks = sample.chips.children.length;
    const released = blocks && reason !== "error" && this.samples.length === 1 ? `, ${blocks} blocks given back` : "";
    sample.meta.textContent = `${REASONS[reason] ?? reason}${released}`;
    if (!sample.tokens.length) sample.body.replaceChildren(...formatted(sample.text));
  }

  // Called when the stream has ended, for any reason.
  end(reason, message) {
    this.failed = reason === "error" || reason === "abort";
    this.seconds = (performance.now() - this.started) / 1000;
    this.node.setAttribute("aria-busy", "false");
    for (const sample of this.samples) if (!sample.reason) this.#finish(sample, reason);
    if (message) {
      this.note.className = "note failed";
      this.note.textContent = message;
      return;
    }
    const parts = [];
    if (this.ttft != null) parts.push(`first token ${seconds(this.ttft)}`);
    if (this.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.usage;
      parts.push(`${count(completion_tokens)} tokens in ${seconds(this.seconds)}`);
      parts.push(`prompt ${count(prompt_tokens)}, ${count(prompt_tokens_details?.cached_tokens ?? 0)} from the cache`);
    }
    this.note.textContent = parts.join(" · ");
  }

  // Draws the current block tables. `mine`: the running sequences of this request.
  showTables(snapshot, mine) {
    for (const sequence of mine) {
      const sample = this.samples[sequence.sample];
      if (!sample || sample.reason) continue;
      const state = sequence.blocks.map((block) => [block, snapshot.fill(block), snapshot.refCount(block)]);
      const key = state.join();
      if (key === sample.shown) continue;
      sample.shown = key;
      sample.meta.textContent = `${count(sequence.num_computed_tokens)} tokens`;
      this.#showChips(sample, state.slice(-MAX_CHIPS), snapshot.blockSize, state.length - MAX_CHIPS);
    }
  }

  #showChips({ chips }, state, size, hidden) {
    while (chips.children.length > state.length) chips.lastChild.remove();
    state.forEach(([block, fill, references], index) => {
      const chip = chips.children[index] ?? chips.appendChild(element("li"));
      chip.dataset.block = block;
      chip.textContent = block;
      chip.classList.toggle("shared", references > 1);
      chip.title = `block ${block}: ${fill} of ${size} tokens${references > 1 ? `, shared by ${references}` : ""}`;
      chip.style.setProperty("--fill", `${(100 * fill) / size}%`);
    });
    chips.dataset.hidden = hidden > 0 ? `${hidden} more before these` : "";
  }

  // Text of tokens [from, to) of a sample's answer, if the tokens are known.
  tokenText(index, from, to) {
    const tokens = this.samples[index]?.tokens.slice(from, to) ?? [];
    return tokens.map((token) => token.token).join("");
  }
}

// A token whose background is stronger the less likely the token was.
function shaded({ token, logprob, top_logprobs }) {
  const probability = Math.exp(logprob);
  const percent = (value) => `${Math.round(value * 100)} %`;
  const others = top_logprobs.filter((other) => other.token !== token);
  const also = others.map((other) => `“${other.token}” ${percent(Math.exp(other.logprob))}`).join(", ");
  const node = element("span", { class: "token", title: `${percent(probability)}${also ? `; else ${also}` : ""}` }, token);
  node.style.setProperty("--doubt", `${Math.round((1 - probability) * 60)}%`);
  return node;
}
