// The batch composition of the last steps: decodes upwards, prompt tokens downwards, memory events as marks.

import { count } from "./dom.js";
import { onTheme, theme } from "./theme.js";

const BAR = 6; // CSS pixels, with the gap
const MARKS = 14; // height of the row of marks at the bottom

export class StepChart {
  #steps = [];
  #pointed = null;
  #frame = 0;

  constructor(canvas, onPoint) {
    this.canvas = canvas;
    this.onPoint = onPoint;
    new ResizeObserver(() => this.#draw()).observe(canvas);
    onTheme(() => this.#draw());
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => {
      this.#pointed = null;
      this.onPoint(null);
      this.#draw();
    });
  }

  set(steps) {
    this.#steps = steps;
    this.#draw();
  }

  get #visible() {
    return this.#steps.slice(-Math.floor(this.canvas.clientWidth / BAR));
  }

  #point(event) {
    const index = Math.floor((event.offsetX - this.#left()) / BAR);
    this.#pointed = this.#visible[index]?.step_id ?? null;
    this.onPoint(this.#visible[index] ?? null);
    this.#draw();
  }

  #left() {
    return this.canvas.clientWidth - this.#visible.length * BAR;
  }

  #draw() {
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    this.#frame = 0;
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colours = theme();
    const steps = this.#visible;
    const most = (of) => Math.max(1, ...steps.map(of));
    const top = most((step) => step.num_decodes);
    const bottom = most((step) => step.num_chunk_tokens);
    const middle = Math.round((height - MARKS) * 0.56);
    const below = height - MARKS - middle - 2;
    steps.forEach((step, index) => {
      const x = this.#left() + index * BAR;
      context.globalAlpha = this.#pointed == null || this.#pointed === step.step_id ? 1 : 0.45;
      context.fillStyle = colours.accent;
      const up = step.num_decodes && Math.max(1.5, (step.num_decodes / top) * (middle - 16));
      context.fillRect(x, middle - up, BAR - 1.5, up);
      context.fillStyle = colours.prompt;
      const down = step.num_chunk_tokens && Math.max(1.5, Math.sqrt(step.num_chunk_tokens / bottom) * below);
      context.fillRect(x, middle + 2, BAR - 1.5, down);
      paintMarks(context, colours, step, x, height - MARKS + 3);
    });
    context.globalAlpha = 1;
    context.fillStyle = colours.line;
    context.fillRect(0, middle, width, 1);
    if (steps.length) paintText(context, colours, `${count(top)} decoding`, 7);
    if (steps.some((step) => step.num_chunk_tokens)) {
      paintText(context, colours, `${count(bottom)} prompt tokens`, height - MARKS - 7);
    }
  }
}

function paintText(context, colours, text, y) {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colours.panel;
  context.fillRect(0, y - 7, context.measureText(text).width + 6, 14);
  context.fillStyle = colours.muted;
  context.fillText(text, 2, y);
}

// Marks below a bar: a triangle for preemptions, a cross for evictions, a ring for copies.
function paintMarks(context, colours, step, x, y) {
  const middle = x + (BAR - 1.5) / 2;
  context.lineWidth = 1.5;
  context.beginPath();
  if (step.num_preempted) {
    context.fillStyle = colours.ink;
    context.moveTo(middle - 3, y);
    context.lineTo(middle + 3, y);
    context.lineTo(middle, y + 5);
    context.fill();
  } else if (step.num_evicted) {
    context.strokeStyle = colours.evict;
    context.moveTo(middle - 2, y);
    context.lineTo(middle + 2, y + 4);
    context.moveTo(middle + 2, y);
    context.lineTo(middle - 2, y + 4);
    context.stroke();
  } else if (step.copies.length) {
    context.strokeStyle = colours.copy;
    context.arc(middle, y + 2.5, 2, 0, 7);
    context.stroke();
  }
}

export function describeStep(step) {
  const parts = [];
  if (step.num_decodes) parts.push(`${count(step.num_decodes)} decoding`);
  if (step.num_chunk_tokens) {
    const chunks = step.num_chunks > 1 ? `${step.num_chunks} prompts` : "a prompt";
    parts.push(`${count(step.num_chunk_tokens)} tokens of ${chunks}`);
  }
  if (step.num_hit_tokens) parts.push(`${count(step.num_hit_tokens)} cached`);
  if (step.copies.length) parts.push(`${step.copies.length} copied`);
  if (step.num_evicted) parts.push(`${step.num_evicted} evicted`);
  if (step.num_preempted) parts.push(`${step.num_preempted} preempted`);
  if (step.compute_seconds != null) parts.push(`${(step.compute_seconds * 1000).toFixed(1)} ms`);
  return `Step ${count(step.step_id)}: ${parts.join(", ")}`;
}
