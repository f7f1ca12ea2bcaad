// The page: connects its parts.

import { ApiError, getJson, getKey, getPhase, setKey } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { Chat } from "./chat.js";
import { $, count, element, seconds } from "./dom.js";
import { describeBlock } from "./inspect.js";
import { CACHED, Monitor, USED, copyReason } from "./memory.js";
import { Parameters } from "./parameters.js";
import { StepChart, describeStep } from "./steps.js";
import { startTheme } from "./theme.js";
import { Tour } from "./tour.js";

const FEED_LENGTH = 30;
const STEPS_CAPTION = $("steps-caption").textContent;
const COPY_TEXTS = {
  prefix: "Prefix copy: a prompt shares only the first tokens of a block, and continues in a copy",
  fork: "Copy-on-write: a sample wrote to a block that another one holds too",
  null: "Copied before a write", // in steps that may have done both
};

const monitor = new Monitor();
const map = new BlockMap($("blocks"), inspect);
const chart = new StepChart($("steps"), (step) => {
  $("steps-caption").textContent = step ? describeStep(step) : STEPS_CAPTION;
});
const chat = new Chat({
  parameters: new Parameters(),
  monitor,
  onMark: (block, sample) => map.mark(block, sample),
  onFirst: (answer) => ($("tile-ttft").textContent = seconds(answer.ttft)),
  askKey,
  findModel: () => connect(),
});
new Tour({ chat, monitor });
startTheme($("theme-button"));

// The memory.

// Screen readers announce a block when the visitor moves to it, not with each token added to it.
function inspect(block, moved) {
  const { snapshot } = map;
  if (block == null || !snapshot || block >= snapshot.numBlocks) return;
  const inspector = $("inspector");
  inspector.setAttribute("aria-live", moved ? "polite" : "off");
  inspector.textContent = describeBlock(snapshot, block, chat.answer);
}

monitor.addEventListener("snapshot", ({ detail }) => {
  const { snapshot, lastStep } = detail;
  $("memory-off").hidden = true;
  $("memory-body").hidden = $("timeline").hidden = false;
  $("memory-body").classList.remove("stale");
  map.set(snapshot);
  if (!monitor.paused) flashHits(monitor.history.at(-2), detail);
  chart.set(monitor.steps.filter((step) => step.step_id <= lastStep));
  showTiles(snapshot);
  showExtent(snapshot);
  showTime();
});

monitor.addEventListener("grown", showTime);

monitor.addEventListener("steps", ({ detail }) => {
  for (const step of detail) {
    for (const [source, target] of step.copies) map.flash("copy", target, source);
    for (const block of step.evicted) map.flash("evict", block);
  }
  tell(detail);
});

monitor.addEventListener("off", ({ detail }) => {
  const { status } = detail;
  const why = {
    401: "The picture of the memory needs the API key, too: the button with the key asks for it.",
    404: "This server does not show its memory: it has several API keys, and one client could watch what others do. It can be switched on with --debug-kv.",
    503: "There is no memory to show while the model loads.",
  };
  const stale = status !== 401 && status !== 404 && map.snapshot !== null;
  const unreachable = `The server cannot be reached${stale ? "; this is what it showed last" : ""}. The page keeps asking.`;
  const text = why[status] ?? (status ? detail.message : unreachable);
  if ($("memory-off").textContent !== text) $("memory-off").textContent = text; // screen readers announce changes
  $("memory-off").hidden = false;
  $("memory-body").hidden = $("timeline").hidden = !stale;
  $("memory-body").classList.toggle("stale", stale);
});

// A cached block that is used again, without an eviction in between, was found by a prompt: a prefix hit.
function flashHits(before, { snapshot, lastStep }) {
  if (before?.snapshot.numBlocks !== snapshot.numBlocks) return;
  const between = monitor.steps.filter((step) => step.step_id > before.lastStep && step.step_id <= lastStep);
  if (!between.some((step) => step.num_hit_tokens)) return;
  const evicted = new Set(between.flatMap((step) => step.evicted));
  if (evicted.size < between.reduce((sum, step) => sum + step.num_evicted, 0)) return; // not all are named
  for (let block = 0; block < snapshot.touched; block++) {
    const found = before.snapshot.states[block] === CACHED && snapshot.states[block] === USED;
    if (found && snapshot.registered(block) && !evicted.has(block)) map.flash("hit", block);
  }
}

function percent(part, whole) {
  const share = (100 * part) / whole;
  if (part && share < 0.1) return "<0.1 %"; // zero would deny what is there
  return `${share >= 10 || !share ? Math.round(share) : share.toFixed(1)} %`;
}

function showTiles({ used, cached, numBlocks, blockSize, view }) {
  $("pool").textContent = `${count(numBlocks)} blocks of ${blockSize} tokens`;
  $("tile-used").textContent = percent(used, numBlocks);
  $("tile-cached").textContent = `+ ${percent(cached, numBlocks)}`;
  $("meter-used").style.width = `${(100 * used) / numBlocks}%`;
  $("meter-cached").style.width = `${(100 * cached) / numBlocks}%`;
  $("tile-running").textContent = count(view.num_running);
  $("tile-waiting").textContent = count(view.num_waiting);
  $("tile-rate").textContent = count(Math.round(monitor.rate()));
  const times = monitor.steps.slice(-32).map((step) => step.compute_seconds).filter((value) => value != null);
  times.sort((a, b) => a - b);
  if (times.length) $("tile-step").textContent = `${(1000 * times[times.length >> 1]).toFixed(1)} ms`;
}

function showExtent({ numBlocks }) {
  const button = $("extent");
  const partial = map.extent < numBlocks;
  button.hidden = !partial && !button.dataset.all;
  button.textContent = partial
    ? `first ${count(map.extent)} shown: show all ${count(numBlocks)}`
    : `all ${count(numBlocks)} shown: show used`;
}

$("extent").addEventListener("click", () => {
  const all = !$("extent").dataset.all;
  if (all) $("extent").dataset.all = "yes";
  else delete $("extent").dataset.all;
  map.showAll(all);
  if (map.snapshot) showExtent(map.snapshot);
});

// The memory events in words: one line per kind, and per reason of copies, for all events of one poll.
function tell(steps) {
  const total = (name) => steps.reduce((sum, step) => sum + step[name], 0);
  const last = steps.at(-1).step_id;
  const evicted = steps.flatMap((step) => step.evicted);
  const lines = [];
  if (total("num_hit_tokens")) {
    lines.push(["hit", `Prefix hit: ${count(total("num_hit_tokens"))} tokens were in the cache and are not computed.`]);
  }
  for (const [reason, text] of Object.entries(COPY_TEXTS)) {
    const copies = steps.filter((step) => String(copyReason(step)) === reason).flatMap((step) => step.copies);
    if (!copies.length) continue;
    const pairs = copies.slice(0, 3).map(([source, target]) => `${source} → ${target}`).join(", ");
    lines.push(["copy", `${text}: ${pairs}${copies.length > 3 ? ", …" : "."}`]);
  }
  if (evicted.length) {
    const number = total("num_evicted");
    const blocks = `${evicted.slice(0, 4).join(", ")}${number > 4 ? ", …" : "."}`;
    lines.push(["evict", `${count(number)} cached block${number > 1 ? "s" : ""} evicted for new tokens: ${blocks}`]);
  }
  if (total("num_preempted")) {
    lines.push(["preempt", `Preempted ${count(total("num_preempted"))}: they gave up their blocks and wait.`]);
  }
  if (!lines.length) return;
  const feed = $("feed");
  if (feed.firstChild?.className === "muted") feed.replaceChildren();
  for (const [kind, text] of lines) {
    feed.prepend(element("li", { "data-kind": kind }, element("span", { class: "muted" }, count(last)), ` ${text}`));
  }
  while (feed.children.length > FEED_LENGTH) feed.lastChild.remove();
}

// Looking back.

$("pause").addEventListener("click", () => setPaused(!monitor.paused));
$("scrub").addEventListener("input", () => {
  if (!monitor.paused) setPaused(true);
  monitor.show(Number($("scrub").value));
});

function setPaused(paused) {
  monitor.pause(paused);
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Live" : "Pause";
  showTime();
}

function showTime() {
  const scrub = $("scrub");
  const end = monitor.history.length - 1;
  scrub.max = Math.max(0, end);
  const index = monitor.paused ? monitor.history.indexOf(monitor.shown) : end;
  scrub.value = index;
  scrub.style.setProperty("--share", `${end > 0 ? (100 * index) / end : 100}%`);
  const ago = monitor.paused && monitor.shown ? (monitor.history.at(-1).at - monitor.shown.at) / 1000 : 0;
  $("when").value = monitor.paused ? `−${ago.toFixed(1)} s` : "live";
}

$("zoom-in").addEventListener("click", () => map.zoomBy(1.6));
$("zoom-out").addEventListener("click", () => map.zoomBy(1 / 1.6));
$("zoom-fit").addEventListener("click", () => map.fit());
$("expand").addEventListener("click", () => {
  const open = document.body.classList.toggle("exploring");
  $("expand").setAttribute("aria-expanded", String(open));
  $("expand").textContent = open ? "Back to chat" : "Explore";
});

// The key.

const WRONG_KEY = "The server did not accept this key.";

let asking = null; // promise of the open dialog, which all callers await

function askKey(reason, wrong = false) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-reason").textContent = reason;
    dialog.classList.toggle("wrong", wrong);
    $("key-input").setAttribute("aria-invalid", String(wrong));
    $("key-input").value = getKey();
    dialog.returnValue = "cancel";
    dialog.showModal();
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "save"), { once: true });
  }).then(async (saved) => {
    asking = null;
    if (saved) setKey($("key-input").value.trim());
    $("key-input").value = "";
    if (saved) await connect();
    return saved;
  });
  return asking;
}

$("key-button").addEventListener("click", () => askKey("Every request carries it as a bearer token."));

// The server: the model it serves, and whether it is ready.

async function connect() {
  try {
    const [model] = (await getJson("v1/models")).data;
    chat.model = model.id;
    chat.maxTokens = model.max_model_len;
    chat.parameters.begin(model.default_sampling_params);
    $("model").textContent = model.id;
    $("model").title = `context of ${count(model.max_model_len)} tokens`;
    document.title = `${model.id} · pageserve`;
    monitor.wake();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      if (getKey()) await askKey(WRONG_KEY, true);
      else await askKey("This server answers only requests that carry a key.");
    }
  }
}

async function watchPhase() {
  let phase = "unreachable";
  try {
    phase = await getPhase();
  } catch {
    // the word says it
  }
  const changed = $("phase").textContent !== phase;
  $("phase").textContent = phase;
  $("health").dataset.phase = phase;
  if (phase === "ready" && (changed || !chat.model) && !asking) await connect();
  setTimeout(watchPhase, phase === "ready" ? 5000 : 1000);
}

$("blocks").addEventListener("focus", () => $("blocks").matches(":focus-visible") && map.snapshot && map.mark(0));
monitor.start();
watchPhase();
