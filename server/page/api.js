// Client of the server's API: JSON and streams by fetch, with this tab's API key.

const KEY = "pageserve.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The key is kept in sessionStorage only: the browser forgets it when the tab is closed.
export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

const url = (path) => new URL(path, document.baseURI); // relative, so a proxy may serve all of it under a prefix

const headers = () => (getKey() ? { authorization: `Bearer ${getKey()}` } : {});

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `${response.status} ${response.statusText}`;
  const wait = response.headers.get("retry-after");
  throw new ApiError(response.status, wait && response.status === 429 ? `${message} (retry in ${wait} s)` : message);
}

export async function getJson(path, options = {}) {
  return (await checked(await fetch(url(path), { headers: headers(), ...options }))).json();
}

// /ready needs no key. While the server is not ready, /ready answers 503 with a reason.
export async function getPhase() {
  const response = await fetch(url("ready"));
  const body = await response.json().catch(() => ({}));
  return response.ok ? "ready" : (body.phase ?? "not ready");
}

// Calls onEvent with the JSON of each event. Resolves at [DONE]; rejects with an ApiError or when aborted.
export async function postStream(path, body, signal, onEvent) {
  const response = await checked(
    await fetch(url(path), {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "The stream broke off before its end.");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a comment that keeps the connection alive
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(500, event.error.message);
      onEvent(event);
    }
  }
}
