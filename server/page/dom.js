// Makes elements without HTML strings: the text of a model can only become text, never markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const FENCE = /```[^\n]*\n?([\s\S]*?)(?:```|$)/g;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

// Formats fenced code, inline code and bold text; leaves the rest unchanged (the element keeps line breaks).
export function formatted(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(FENCE)) {
    nodes.push(...inline(text.slice(end, match.index)), element("pre", {}, element("code", {}, match[1])));
    end = match.index + match[0].length;
  }
  return [...nodes, ...inline(text.slice(end))];
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), match[1] ? element("code", {}, match[1]) : element("b", {}, match[2]));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)];
}

export const count = (number) => number.toLocaleString("en");

export function seconds(value) {
  if (value == null) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export const letter = (index) => String.fromCharCode(65 + (index % 26));

let lastSaid;
export function announce(text) {
  if (text !== lastSaid) document.getElementById("announcer").textContent = lastSaid = text;
}
