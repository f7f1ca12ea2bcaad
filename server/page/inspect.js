// The inspector's description of a block, in whole sentences.

import { count, letter } from "./dom.js";
import { CACHED, FREE } from "./memory.js";

export function describeBlock(snapshot, block, answer) {
  const size = snapshot.blockSize;
  const name = `Block ${count(block)}`;
  if (snapshot.states[block] === FREE) return `${name} is free: room for ${size} tokens, for whoever needs it next.`;
  if (snapshot.states[block] === CACHED) {
    return `${name} is cached: nobody holds it, but the keys and values of ${size} tokens are still there. A prompt that starts with the same tokens takes it over; else it is evicted when space is needed.`;
  }
  const holders = snapshot.holders(block);
  const fill = snapshot.fill(block);
  const parts = [`${name}: ${fill === size ? `full, ${size} tokens` : `${fill} of ${size} tokens`}`];
  parts.push(holders.length ? whose(holders) : "held by a sequence");
  if (holders.length) parts.push(which(snapshot, block, holders[0], fill, answer));
  let text = `${parts.join(", ")}.`;
  if (snapshot.refCount(block) > 1) {
    const full = fill === size;
    const why = full ? "It is full, so nobody will write to it." : "The first sample to write to it gets a copy.";
    text += ` Ref count ${snapshot.refCount(block)}: they read the same keys and values. ${why}`;
  } else if (snapshot.registered(block)) text += " The prefix cache knows it: an equal prompt would share it.";
  return text;
}

function whose(holders) {
  const [first] = holders;
  if (holders.length > 4) return `held by ${holders.length} sequences`;
  if (first.own) {
    if (!first.lettered) return `held by ${list(holders.map((holder) => holder.label))}`;
    const samples = list(holders.map((holder) => letter(holder.sample)));
    return `held by sample${holders.length > 1 ? "s" : ""} ${samples} of ${first.label}`;
  }
  const requests = new Set(holders.map((holder) => holder.request_id));
  return `held by ${holders.length > 1 ? `${holders.length} samples` : "a sample"} of ${requests.size > 1 ? "other requests" : "another request"}`;
}

const list = (words) => words.join(", ").replace(/, ([^,]*)$/, " and $1");

// The block's place in its sequence, and its text if the answer knows the tokens.
function which(snapshot, block, holder, fill, answer) {
  const size = snapshot.blockSize;
  const index = holder.blocks.indexOf(block);
  const [from, to] = [index * size, index * size + fill];
  const prompt = holder.num_prompt_tokens;
  const place = `number ${index + 1} of ${holder.blocks.length} in its table`;
  if (to <= prompt) return `${place}: tokens ${from + 1} to ${to} of the prompt`;
  const start = Math.max(0, from - prompt);
  const words = `${from < prompt ? "the end of the prompt and " : ""}tokens ${start + 1} to ${to - prompt} of the answer`;
  const mine = answer && holder.request_id === `${answer.id}-0`;
  const text = mine ? answer.tokenText(holder.sample, start, to - prompt) : "";
  return `${place}: ${words}${text ? ` (“${text.trim()}”)` : ""}`;
}
