// Dark or light: the system's setting, until the visitor uses the button. Canvases get the CSS colours from here.

const NAMES = ["ink", "muted", "line", "line-strong", "panel", "inset", "accent", "prompt", "cached", "cached-dot", "copy", "evict", "hit"];
const KEY = "pageserve.theme";
const SYSTEM = matchMedia("(prefers-color-scheme: dark)");

const listeners = new Set();
let colours;

export const OWN_COLOURS = 8;
export const OTHER_COLOURS = 6;

export const isDark = () => (document.documentElement.dataset.theme ?? (SYSTEM.matches ? "dark" : "light")) === "dark";

// {ink, ..., own: [...], other: [...]}, each colour as "rgb(r, g, b)".
export function theme() {
  return (colours ??= read());
}

export function onTheme(listener) {
  listeners.add(listener);
}

function read() {
  const probe = document.createElement("span");
  document.body.append(probe);
  const resolve = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(NAMES.map((name) => [name, resolve(name)]));
  found.own = Array.from({ length: OWN_COLOURS }, (_, i) => resolve(`own-${i}`));
  found.other = Array.from({ length: OTHER_COLOURS }, (_, i) => resolve(`other-${i}`));
  probe.remove();
  return found;
}

function changed() {
  colours = undefined;
  for (const listener of listeners) listener();
}

export function startTheme(button) {
  const chosen = localStorage.getItem(KEY);
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  const show = () => button.setAttribute("aria-label", isDark() ? "Switch to light" : "Switch to dark");
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(KEY, next);
    show();
    changed();
  });
  SYSTEM.addEventListener("change", () => {
    show();
    changed();
  });
  show();
}
