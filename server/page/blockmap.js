// The map: one cell per block, in order of block numbers, row by row. Large cells show owner, fill and ref count. Below
// four pixels a block is one pixel of an image that the canvas scales, so that a pool of any size is one draw call.

import { letter, reducedMotion } from "./dom.js";
import { CACHED, FREE, USED } from "./memory.js";
import { onTheme, theme } from "./theme.js";

const MAX_PITCH = 30; // CSS pixels
const MARGIN = 10; // space around the cells, for flashes at the edge
const DETAIL_PITCH = 4;
const LABEL_SIZE = 12; // smallest cell that has room for a letter
const MAX_ZOOM_PITCH = 44;
const FLASH_MS = { copy: 2000, hit: 1600, evict: 900 };
const MAX_FLASHES = 160;

export class BlockMap {
  zoom = 1;
  #x = 0; // left upper corner of the view, in CSS pixels at the current zoom
  #y = 0;
  #snapshot = null;
  #extent = 0; // number of blocks that are drawn, from the first on
  #all = false;
  #flashes = [];
  #marked = null; // the block under the pointer or the cursor
  #sample = null;
  #image = null;
  #frame = 0;

  // onMark(block or null, moved): `moved`: another block is marked; else a new snapshot describes the same block anew.
  constructor(canvas, onMark) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.onMark = onMark;
    new ResizeObserver(() => this.#layout()).observe(canvas);
    onTheme(() => this.#changed());
    this.#listen();
  }

  get snapshot() {
    return this.#snapshot;
  }

  get extent() {
    return this.#extent;
  }

  set(snapshot) {
    const before = this.#snapshot;
    this.#snapshot = snapshot;
    if (before?.numBlocks !== snapshot.numBlocks) this.#extent = 0;
    const extent = this.#all ? snapshot.numBlocks : extentFor(snapshot);
    if (this.#all ? extent !== this.#extent : extent > this.#extent) {
      this.#extent = extent;
      this.#layout();
    }
    this.#changed();
    if (this.#marked != null) this.onMark(this.#marked, false);
  }

  showAll(all) {
    this.#all = all;
    this.#extent = 0;
    this.fit();
    if (this.#snapshot) this.set(this.#snapshot);
  }

  // kind: "evict", "hit", or "copy" with the source block.
  flash(kind, block, source = null) {
    this.#flashes.push({ kind, block, source, start: performance.now() });
    this.#flashes.splice(0, this.#flashes.length - MAX_FLASHES);
    this.#draw();
  }

  // `sample`: the one of our samples holding the block whose block table is followed.
  mark(block, sample = null) {
    if (block === this.#marked && sample === this.#sample) return;
    this.#marked = block;
    this.#sample = sample;
    this.onMark(block, true);
    this.#draw();
  }

  fit() {
    this.zoom = 1;
    this.#x = this.#y = 0;
    this.canvas.classList.remove("zoomed");
    this.#changed();
  }

  zoomBy(factor, x = this.#width / 2 + MARGIN, y = this.#height / 2 + MARGIN) {
    const zoom = Math.min(Math.max(1, this.zoom * factor), Math.max(1, MAX_ZOOM_PITCH / this.#pitch));
    const scale = zoom / this.zoom;
    this.zoom = zoom;
    this.#x = (this.#x + x - MARGIN) * scale - x + MARGIN;
    this.#y = (this.#y + y - MARGIN) * scale - y + MARGIN;
    this.#clamp();
    this.canvas.classList.toggle("zoomed", zoom > 1);
    this.#changed();
  }

  // Layout: the largest cell size at which all blocks fit.

  #width = 1;
  #height = 1;
  #ratio = 1;
  #pitch = 1;
  #columns = 1;

  #layout() {
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth || !clientHeight) return;
    this.#ratio = devicePixelRatio || 1;
    const width = (this.#width = clientWidth - 2 * MARGIN);
    const height = (this.#height = clientHeight - 2 * MARGIN);
    this.canvas.width = Math.round(clientWidth * this.#ratio);
    this.canvas.height = Math.round(clientHeight * this.#ratio);
    const number = Math.max(this.#extent, 1);
    let pitch = Math.min(MAX_PITCH, Math.sqrt((width * height) / number));
    const unit = pitch * this.#ratio > DETAIL_PITCH ? 1 / this.#ratio : pitch / 64; // whole device pixels are crisp
    pitch = Math.floor(pitch / unit) * unit;
    while (Math.floor(width / pitch) * Math.floor(height / pitch) < number) pitch -= unit;
    this.#pitch = pitch;
    this.#columns = Math.floor(width / pitch);
    this.#clamp();
    this.#changed();
  }

  get #rows() {
    return Math.ceil(this.#extent / this.#columns);
  }

  #clamp() {
    const cell = this.#pitch * this.zoom;
    this.#x = Math.max(0, Math.min(this.#x, this.#columns * cell - this.#width));
    this.#y = Math.max(0, Math.min(this.#y, this.#rows * cell - this.#height));
  }

  #at(x, y) {
    const cell = this.#pitch * this.zoom;
    const column = Math.floor((x - MARGIN + this.#x) / cell);
    const block = Math.floor((y - MARGIN + this.#y) / cell) * this.#columns + column;
    return column >= 0 && column < this.#columns && block >= 0 && block < this.#extent ? block : null;
  }

  // Left upper corner and size of a cell, in device pixels.
  #cell(block) {
    const size = this.#pitch * this.zoom * this.#ratio;
    return [
      (block % this.#columns) * size + (MARGIN - this.#x) * this.#ratio,
      Math.floor(block / this.#columns) * size + (MARGIN - this.#y) * this.#ratio,
      size,
    ];
  }

  // Drawing. The blocks are drawn once per snapshot; flashes and marks are drawn over them in every frame.

  #base = null;

  #changed() {
    this.#base = null;
    this.#image = null;
    this.#draw();
  }

  #draw() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    this.#frame = 0;
    if (!this.#snapshot || this.canvas.width < 2) return;
    const { context, canvas } = this;
    if (!this.#base) {
      this.#base = new OffscreenCanvas(canvas.width, canvas.height);
      this.#paintBase(this.#base.getContext("2d"));
    }
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.#base, 0, 0);
    this.#paintTable(context);
    const now = performance.now();
    const age = (flash) => (now - flash.start) / FLASH_MS[flash.kind];
    this.#flashes = this.#flashes.filter((flash) => age(flash) < 1);
    for (const flash of this.#flashes) this.#paintFlash(context, flash, Math.max(0, age(flash)));
    if (!this.#flashes.length) return;
    if (reducedMotion()) setTimeout(() => this.#draw(), FLASH_MS.evict / 2);
    else this.#draw();
  }

  #paintBase(context) {
    const size = this.#pitch * this.zoom * this.#ratio;
    if (size < DETAIL_PITCH) return this.#paintPixels(context, size);
    const first = Math.max(0, Math.floor(((this.#y - MARGIN) * this.#ratio) / size)) * this.#columns;
    const last = Math.min(this.#extent, first + (Math.ceil(this.canvas.height / size) + 2) * this.#columns);
    const colours = theme();
    const gap = size >= 14 * this.#ratio ? 2 * this.#ratio : size >= 6 ? Math.max(1, this.#ratio) : 1;
    for (let block = first; block < last; block++) this.#paintBlock(context, colours, block, gap);
  }

  #paintBlock(context, colours, block, gap) {
    const [x, y, pitch] = this.#cell(block);
    if (x + pitch < 0 || x > this.canvas.width) return;
    const snapshot = this.#snapshot;
    const state = snapshot.states[block];
    const left = Math.round(x);
    const top = Math.round(y);
    const size = Math.round(x + pitch) - left - gap;
    const height = Math.round(y + pitch) - top - gap;
    if (state === FREE) {
      context.fillStyle = colours.inset;
      context.fillRect(left, top, size, height);
      if (size >= 5 * this.#ratio) this.#paintFrame(context, colours["line-strong"], 1, left, top, size, height);
      return;
    }
    if (state === CACHED) {
      context.fillStyle = colours.cached;
      context.fillRect(left, top, size, height);
      const dot = Math.max(1, Math.round(size / 3));
      context.fillStyle = colours["cached-dot"];
      context.fillRect(left + ((size - dot) >> 1), top + ((height - dot) >> 1), dot, dot);
      return;
    }
    const holders = snapshot.holders(block).slice(0, 4);
    const filled = Math.max(1, Math.round((height * snapshot.fill(block)) / snapshot.blockSize));
    holders.forEach((holder, index) => {
      const from = Math.round((size * index) / holders.length);
      const width = Math.round((size * (index + 1)) / holders.length) - from;
      context.fillStyle = colourOf(holder, colours);
      context.globalAlpha = 0.28;
      if (filled < height) context.fillRect(left + from, top, width, height - filled);
      context.globalAlpha = 1;
      context.fillRect(left + from, top + height - filled, width, filled);
    });
    if (size < 8 * this.#ratio) return;
    if (snapshot.refCount(block) > 1) this.#paintFrame(context, colours.ink, 1.5, left, top, size, height);
    if (size >= LABEL_SIZE * this.#ratio) this.#paintLabel(context, block, holders, left, top, size, height);
  }

  #paintFrame(context, colour, thickness, left, top, size, height) {
    const line = Math.max(1, Math.round(thickness * this.#ratio));
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left + line / 2, top + line / 2, size - line, height - line);
  }

  // Shows the owner without colours too: the letter of the sample, or the number of sequences that share the block.
  #paintLabel(context, block, holders, left, top, size, height) {
    const references = this.#snapshot.refCount(block);
    const text = references > 1 ? `${references}` : holders[0]?.lettered ? letter(holders[0].sample) : "";
    if (!text) return;
    const full = this.#snapshot.fill(block) > this.#snapshot.blockSize * 0.6;
    context.font = `600 ${Math.round(size * 0.52)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = full ? "rgb(255 255 255 / 0.96)" : theme().ink;
    if (full) {
      context.shadowColor = "rgb(0 0 0 / 0.55)";
      context.shadowBlur = 3 * this.#ratio;
    }
    context.fillText(text, left + size / 2, top + height / 2 + this.#ratio * 0.5);
    context.shadowBlur = 0;
  }

  #paintPixels(context, size) {
    const colours = theme();
    if (!this.#image) {
      const image = new ImageData(this.#columns, this.#rows);
      const pixels = new Uint32Array(image.data.buffer);
      const snapshot = this.#snapshot;
      const packed = { free: pack(colours.inset), cached: pack(colours["cached-dot"]), none: pack(colours.muted) };
      const bySequence = snapshot.sequences.map((sequence) => pack(colourOf(sequence, colours)));
      for (let block = 0; block < this.#extent; block++) {
        const state = snapshot.states[block];
        if (state === USED) pixels[block] = bySequence[snapshot.first[block] - 1] ?? packed.none;
        else pixels[block] = state === CACHED ? packed.cached : packed.free;
      }
      this.#image = new OffscreenCanvas(image.width, image.height);
      this.#image.getContext("2d").putImageData(image, 0, 0);
    }
    context.imageSmoothingEnabled = size < 1; // several blocks per pixel: their mean
    context.imageSmoothingQuality = "high";
    const [x, y] = [(MARGIN - this.#x) * this.#ratio, (MARGIN - this.#y) * this.#ratio];
    context.drawImage(this.#image, x, y, this.#image.width * size, this.#image.height * size);
  }

  // Draws the marked block and its holder's block table: other blocks fade, a line follows the table.
  #paintTable(context) {
    const block = this.#marked;
    if (block == null || block >= this.#extent) return;
    const colours = theme();
    const holders = this.#snapshot.holders(block);
    const holder = holders.find((each) => each.lettered && each.sample === this.#sample) ?? holders[0];
    if (holder) {
      context.globalAlpha = 0.72;
      context.fillStyle = colours.panel;
      context.fillRect(0, 0, this.canvas.width, this.canvas.height);
      context.globalAlpha = 1;
      const ids = holder.blocks.filter((id) => id < this.#extent);
      this.#paintLine(context, colours, ids);
      const gap = this.#pitch * this.zoom >= 14 ? 2 * this.#ratio : 1;
      for (const id of ids) this.#paintBlock(context, colours, id, gap);
    }
    const [x, y, size] = this.#cell(block);
    const outer = Math.max(size, 8 * this.#ratio);
    const shift = (outer - size) / 2;
    context.lineWidth = 2.5 * this.#ratio;
    context.strokeStyle = colours.ink;
    context.strokeRect(x - shift - this.#ratio, y - shift - this.#ratio, outer + this.#ratio, outer + this.#ratio);
  }

  #paintLine(context, colours, ids) {
    context.beginPath();
    for (const id of ids) {
      const [x, y, size] = this.#cell(id);
      context.lineTo(x + size / 2, y + size / 2);
    }
    context.lineJoin = "round";
    context.lineWidth = 1.5 * this.#ratio;
    context.strokeStyle = colours.muted;
    context.stroke();
  }

  #paintFlash(context, { kind, block, source }, age) {
    if (block >= this.#extent) return;
    const colours = theme();
    const still = reducedMotion();
    const [x, y, size] = this.#cell(block);
    const [cx, cy] = [x + size / 2, y + size / 2];
    const growth = still || kind === "evict" ? 1 : kind === "hit" ? 1.5 - 0.5 * easeOut(age) : 1 + 0.7 * easeOut(age);
    const grown = Math.max(size - this.#ratio, 5 * this.#ratio) * growth;
    const behind = this.#marked != null && this.#snapshot.first[this.#marked]; // a block table is highlighted
    context.globalAlpha = (still ? 1 : 1 - age * age) * (behind ? 0.3 : 1);
    const path = new Path2D();
    path.rect(cx - grown / 2, cy - grown / 2, grown, grown);
    if (kind === "evict" && size >= 6 * this.#ratio) {
      const arm = size * 0.26;
      path.moveTo(cx - arm, cy - arm);
      path.lineTo(cx + arm, cy + arm);
      path.moveTo(cx + arm, cy - arm);
      path.lineTo(cx - arm, cy + arm);
    }
    if (kind === "copy" && source < this.#extent) {
      const [sx, sy] = this.#cell(source).map((at) => at + size / 2);
      const bend = Math.min(40 * this.#ratio, Math.hypot(cx - sx, cy - sy) / 3 + 8);
      path.moveTo(sx, sy);
      path.quadraticCurveTo((sx + cx) / 2, (sy + cy) / 2 - bend, cx, cy);
    }
    const width = Math.min((kind === "copy" ? 2.5 : 2) * this.#ratio, Math.max(size / 7, this.#ratio));
    context.lineWidth = width + Math.min(2 * this.#ratio, size / 8); // outline: some owners have nearly its colour
    context.strokeStyle = colours.panel;
    context.stroke(path);
    context.lineWidth = width;
    context.strokeStyle = colours[kind];
    context.stroke(path);
    context.globalAlpha = 1;
  }

  // Input by pointer and keyboard.

  #listen() {
    const { canvas } = this;
    const pointers = new Map();
    let moved = false;
    const place = (event) => [event.offsetX, event.offsetY];
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, place(event));
      moved = false;
      if (this.zoom > 1) canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      const now = place(event);
      if (before && this.zoom > 1 && pointers.size === 1) {
        this.#x -= now[0] - before[0];
        this.#y -= now[1] - before[1];
        this.#clamp();
        this.#changed();
      } else if (before && pointers.size === 2) {
        const [other] = [...pointers].find(([id]) => id !== event.pointerId).slice(1);
        const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]) || 1;
        this.zoomBy(distance(now, other) / distance(before, other), ...now);
      }
      moved ||= before != null && Math.hypot(now[0] - before[0], now[1] - before[1]) > 3;
      if (before) pointers.set(event.pointerId, now);
      if (event.pointerType === "mouse" && !before) this.mark(this.#at(...now));
    });
    const up = (event) => {
      if (pointers.delete(event.pointerId) && !moved && event.type === "pointerup") this.mark(this.#at(...place(event)));
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.mark(null));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && this.zoom === 1) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) return this.zoomBy(Math.exp(-event.deltaY / 150), ...place(event));
      this.#x += event.deltaX;
      this.#y += event.deltaY;
      this.#clamp();
      this.#changed();
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.mark(null));
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns };
    if (event.key in steps) {
      const next = this.#marked == null ? 0 : this.#marked + steps[event.key];
      if (next >= 0 && next < this.#extent) this.#reveal(next);
    } else if (event.key === "Home") this.#reveal(0);
    else if (event.key === "End") this.#reveal(this.#extent - 1);
    else if (event.key === "+" || event.key === "=") this.zoomBy(1.5);
    else if (event.key === "-") this.zoomBy(1 / 1.5);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.mark(null);
    else return;
    event.preventDefault();
  }

  #reveal(block) {
    const [x, y, size] = this.#cell(block).map((value) => value / this.#ratio);
    this.#x += Math.min(0, x - MARGIN) + Math.max(0, x - MARGIN + size - this.#width);
    this.#y += Math.min(0, y - MARGIN) + Math.max(0, y - MARGIN + size - this.#height);
    this.#clamp();
    if (this.zoom > 1) this.#changed();
    this.mark(block);
  }
}

// Blocks are allocated from the first on, so the map of a large pool shows only the used part, in powers of two.
function extentFor({ numBlocks, touched }) {
  let extent = 512;
  while (extent < touched * 1.05) extent *= 2;
  return extent * 1.5 >= numBlocks ? numBlocks : extent;
}

const colourOf = (sequence, colours) => (sequence.own ? colours.own : colours.other)[sequence.colour];

const easeOut = (t) => 1 - (1 - t) ** 3;

// "rgb(r, g, b)" as a 32-bit pixel of a little-endian machine.
function pack(colour) {
  const [red, green, blue] = colour.match(/[\d.]+/g).map(Number);
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}
