// The chat API over fetch: one request, its events one by one.

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Yields the objects of a streamed answer. Throws Refusal (the server said why), AbortError (stopped), or Error.
export async function* answer(body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = "Bearer " + key;
  let response;
  try {
    response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  }
  if (!response.ok) throw new Refusal(await reason(response), response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The connection broke off in the middle of the answer.");
    }
    if (piece.done) throw new Error("The answer ended before it was whole.");
    const parts = (held + piece.value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message, response.status);
      yield event;
    }
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
