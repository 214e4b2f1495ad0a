// Calls to the server's API. Paths are relative to the page, so that they work below a prefix too.

import { $ } from "./dom.js";

/** A failure with a message for the user. If the server has refused a request, `status` is the HTTP status, and `param` the field
 * of the request that the server names, or null. */
export class Failure extends Error {
  constructor(message, status = null, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function call(path, options = {}) {
  const key = $("key").value.trim();
  const headers = { ...(options.body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Return the failure of a refused request, with what the user can do about it. */
async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 2000);
  let param = null;
  try {
    ({ message, param } = JSON.parse(text).error);
  } catch { /* a response of a proxy between the page and the server */ }
  const wait = response.headers.get("retry-after");
  const todo = response.status === 401 ? " Give an API key in the settings." : wait ? ` Try again in ${wait} s.` : "";
  return new Failure(`${message || response.statusText} (status ${response.status})${todo}`, response.status, param);
}

/** Return the JSON of a GET route. */
export const get = async (path) => (await call(path)).json();

/** Yield the chunks of a streamed answer. Throws Failure, also if the stream ends before the answer does. */
export async function* chunks(body, signal) {
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message, null, chunk.error.param);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure(`The connection broke before the answer was complete: ${error.message}. Is the server still running?`);
  }
  throw new Failure("The connection ended before the answer was complete. Is the server still running?");
}

/** Yield the data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}
