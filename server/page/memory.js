// The monitor: polls /debug/kv and /debug/steps, keeps both as snapshots, and reports changes as events.

import { ApiError, getJson } from "./api.js";
import { OTHER_COLOURS, OWN_COLOURS } from "./theme.js";

const BUSY_MS = 80;
const IDLE_MS = 800;
const LOOK_BACK = 600; // snapshots
const LOOK_BACK_BLOCKS = 8e6; // blocks in all snapshots: large pools keep fewer snapshots
const STEPS_KEPT = 600;
const COLOURS_KEPT = 4096; // colours of other clients' requests: more than run or wait at a time

export const FREE = 0;
export const CACHED = 1;
export const USED = 2;
const STATE = { ".": FREE, c: CACHED, u: USED, p: USED };

// Why a step copied blocks: "fork" (a sample wrote to a block that other samples hold too) or "prefix" (a prompt shares
// only the first tokens of a full block); null if the step may have done both. A prefix copy is made in the step that
// counts the hit; only decodes write to blocks of a fork.
export function copyReason({ num_hit_tokens, num_decodes }) {
  if (!num_hit_tokens) return "fork";
  return num_decodes ? null : "prefix";
}

// Our requests: request id -> the inspector's name for it, and its colour if its samples share one.
const own = new Map();
export function claim(requestId, label, colour = null) {
  own.set(requestId, { label, colour });
}

// The memory at one moment. A block is a number; `holders(block)`: the sequences whose block tables contain it.
export class Snapshot {
  constructor(view, colourOf) {
    this.view = view;
    this.numBlocks = view.num_blocks;
    this.blockSize = view.block_size;
    this.states = Uint8Array.from(view.states, (letter) => STATE[letter]);
    this.registered = (block) => view.states[block] === "p" || view.states[block] === "c";
    this.sequences = view.sequences.map((sequence) => ({ ...sequence, ...colourOf(sequence) }));
    this.first = new Uint16Array(this.numBlocks); // number of the first holder, from 1; 0: no holder
    this.more = new Map(); // block -> all holders, if there are several
    this.sequences.forEach((sequence, index) => {
      for (const block of sequence.blocks) {
        if (!this.first[block]) this.first[block] = index + 1;
        else if (this.more.has(block)) this.more.get(block).push(index);
        else this.more.set(block, [this.first[block] - 1, index]);
      }
    });
    this.used = this.cached = this.touched = 0;
    for (let block = 0; block < this.numBlocks; block++) {
      if (this.states[block] === FREE) continue;
      this.touched = block + 1;
      if (this.states[block] === USED) this.used++;
      else this.cached++;
    }
  }

  holders(block) {
    const indices = this.more.get(block) ?? (this.first[block] ? [this.first[block] - 1] : []);
    return indices.map((index) => this.sequences[index]);
  }

  refCount(block) {
    return this.view.shared[block] ?? (this.states[block] === USED ? 1 : 0);
  }

  fill(block) {
    if (this.states[block] === FREE) return 0;
    return this.view.partial[block] ?? this.blockSize;
  }
}

// Events: "snapshot" (the shown snapshot changed), "steps" (new records), "grown" (a snapshot arrived while paused),
// "off" (why there is no memory to show).
export class Monitor extends EventTarget {
  history = []; // {snapshot, lastStep}
  steps = []; // records of steps as objects, the oldest first
  limits = {};
  shown = null; // the entry of `history` that is shown
  paused = false;
  busy = false; // one of our requests is running

  #colours = new Map(); // request id -> colour, the oldest first
  #numColours = 0;
  #lastStep = -1;
  #lastNews = 0;
  #awaiting = []; // resolve functions of nextPoll()
  #timer;

  start() {
    document.addEventListener("visibilitychange", () => document.hidden || this.#soon(0));
    this.#soon(0);
  }

  // Polls at once, without waiting for the idle interval: a request starts, or the visitor gave a key.
  wake() {
    this.#soon(0);
  }

  // Resolves after a poll that begins from now on, also if it fails.
  nextPoll() {
    return new Promise((resolve) => {
      this.#awaiting.push(resolve);
      this.#soon(BUSY_MS);
    });
  }

  pause(paused) {
    this.paused = paused;
    if (!paused) this.show(this.history.length - 1);
  }

  show(index) {
    this.shown = this.history[index] ?? null;
    if (this.shown) this.#emit("snapshot", this.shown);
  }

  // Sampled tokens per second over the last second of work; 0 if the last records are older.
  rate() {
    const done = this.steps.filter((step) => step.finished_at != null);
    if (!done.length || performance.now() - this.#lastNews > 1500) return 0;
    const end = done.at(-1).finished_at;
    const recent = done.filter((step) => step.finished_at > end - 1);
    const span = end - recent[0].finished_at;
    const sampled = recent.slice(1).reduce((sum, step) => sum + step.num_sampled, 0);
    return span > 0 ? sampled / span : 0;
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  #soon(milliseconds) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), milliseconds);
  }

  async #poll() {
    let wait = IDLE_MS;
    const awaiting = this.#awaiting.splice(0);
    try {
      const [view, steps] = await Promise.all([getJson("debug/kv"), getJson("debug/steps")]);
      this.#takeSteps(steps);
      this.#takeView(view);
      if (this.busy || steps.num_running || steps.num_waiting) wait = BUSY_MS;
    } catch (error) {
      wait = 2000;
      const status = error instanceof ApiError ? error.status : 0;
      this.#emit("off", { status, message: error.message });
      if (status === 401 || status === 404) return; // wake() polls again
    } finally {
      for (const resolve of awaiting) resolve();
    }
    if (!document.hidden) this.#soon(wait);
  }

  #takeView(view) {
    const snapshot = new Snapshot(view, (sequence) => this.#colourOf(sequence));
    this.history.push({ snapshot, lastStep: this.#lastStep, at: performance.now() });
    const limit = Math.max(20, Math.min(LOOK_BACK, LOOK_BACK_BLOCKS / view.num_blocks));
    // The oldest snapshot is dropped, also while paused: a tab may stay paused overnight. The shown one is kept.
    if (this.history.length > limit) this.history.splice(this.history[0] === this.shown ? 1 : 0, 1);
    if (this.paused) this.#emit("grown");
    else this.show(this.history.length - 1);
  }

  #takeSteps(body) {
    this.limits = body;
    const records = body.steps.map((step) => Object.fromEntries(body.columns.map((name, i) => [name, step[i]])));
    if (records.length && records.at(-1).step_id < this.#lastStep) {
      this.steps = []; // a restarted or another server
      this.#lastStep = -1;
    }
    const known = new Map(this.steps.slice(-8).map((step) => [step.step_id, step]));
    for (const record of records) if (known.has(record.step_id)) Object.assign(known.get(record.step_id), record);
    const fresh = records.filter((record) => record.step_id > this.#lastStep);
    if (!fresh.length) return;
    this.#lastNews = performance.now();
    this.#lastStep = fresh.at(-1).step_id;
    this.steps.push(...fresh);
    this.steps.splice(0, this.steps.length - STEPS_KEPT);
    this.#emit("steps", fresh);
  }

  // Our samples have strong colours, one per letter; other clients' requests have muted colours, one per request.
  #colourOf({ request_id, sample }) {
    const ours = own.get(request_id);
    if (ours) return { own: true, label: ours.label, lettered: ours.colour == null, colour: (ours.colour ?? sample) % OWN_COLOURS };
    if (!this.#colours.has(request_id)) {
      this.#colours.set(request_id, this.#numColours++ % OTHER_COLOURS);
      if (this.#colours.size > COLOURS_KEPT) this.#colours.delete(this.#colours.keys().next().value);
    }
    return { own: false, colour: this.#colours.get(request_id) };
  }
}
