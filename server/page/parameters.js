// The parameters of a request: the form, its one-line summary, and the fields to send. Kept between visits.

import { $, letter } from "./dom.js";

const KEPT = "pageserve.parameters";

export class Parameters {
  constructor() {
    this.form = $("composer");
    this.panel = $("parameters");
    this.button = $("parameters-button");
    this.button.addEventListener("click", () => this.#toggle(this.panel.hidden));
    this.panel.addEventListener("input", () => this.#changed());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.#toggle(false);
      this.button.focus();
    });
    this.#restore();
    this.#show();
  }

  get #fields() {
    return [...this.panel.querySelectorAll("input, textarea")];
  }

  #value(name) {
    return this.form.elements[name].value.trim();
  }

  // The fields of a request. Empty fields are left out, so the server's defaults apply.
  request() {
    const body = { temperature: Number(this.#value("temperature")), top_p: Number(this.#value("top_p")) };
    for (const name of ["max_tokens", "top_k", "seed", "n"]) {
      if (this.#value(name) !== "") body[name] = Number(this.#value(name));
    }
    if (this.form.elements.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: 3 });
    return body;
  }

  get system() {
    return this.#value("system");
  }

  // Sliders start at the model's own defaults, from /v1/models, unless the visitor has moved them before.
  begin(defaults) {
    const kept = this.#kept();
    for (const name of ["temperature", "top_p"]) {
      if (!(name in kept) && name in defaults) this.form.elements[name].value = defaults[name];
    }
    this.#show();
  }

  #toggle(open) {
    this.panel.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
  }

  #changed() {
    this.#show();
    const kept = this.#fields.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(kept)));
  }

  #kept() {
    try {
      return JSON.parse(localStorage.getItem(KEPT) ?? "{}") ?? {};
    } catch {
      localStorage.removeItem(KEPT); // unreadable, so reset
      return {};
    }
  }

  #restore() {
    const kept = this.#kept();
    for (const field of this.#fields) {
      if (!(field.name in kept)) continue;
      if (field.type === "checkbox") field.checked = kept[field.name] === true;
      else field.value = kept[field.name];
    }
  }

  #show() {
    for (const field of this.panel.querySelectorAll("input[type=range]")) {
      this.panel.querySelector(`output[for="${field.id}"]`).value = field.value;
      const share = (field.value - field.min) / (field.max - field.min);
      field.style.setProperty("--share", `${share * 100}%`);
    }
    const { temperature, n = 1, max_tokens } = this.request();
    const samples = n > 1 ? `samples A–${letter(n - 1)}` : "1 sample";
    $("parameters-summary").textContent =
      `temperature ${temperature} · ${samples}${max_tokens ? ` · ${max_tokens} tokens` : ""}`;
  }
}
