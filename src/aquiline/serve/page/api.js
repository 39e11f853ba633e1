// Calls of the server: the request of an answer, its stream, and everything that can go wrong in words.

/** Why there is no answer, or not all of it.
 *
 * kind: "key" (the server wants another API key), "busy" (later it may work; waitS says when), "refused" (the request
 * cannot work as it is) or "lost" (the connection). */
export class Failure extends Error {
  constructor(kind, message, waitS = 0) {
    super(message);
    this.kind = kind;
    this.waitS = waitS;
  }
}

/** The model that the server serves: its name, its context, how it drafts; of a draft that learns, its generation. */
export async function served(key) {
  const reply = await call("v1/models", { key });
  const [model] = (await reply.json()).data;
  const health = await (await call("health", { key })).text();
  return health ? { ...model, ...JSON.parse(health) } : model;
}

/** The chunks of a streamed answer. Throws a Failure; throws an AbortError once `signal` stops it. */
export async function* streamed(body, key, signal) {
  const reply = await call("v1/chat/completions", { key, signal, method: "POST", body: JSON.stringify(body) });
  for await (const data of eventsOf(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failureOf(chunk.error);
    yield chunk;
  }
  throw new Failure("lost", "The connection ended before the answer did.");
}

async function call(path, { key, ...init }) {
  if (/[^ -~]/.test(key)) throw new Failure("key", "The API key holds a character that keys do not have. Enter it again.");
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await connected(() => fetch(path, { ...init, headers, cache: "no-store" }));
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await connected(() => reader.read());
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) yield event.replace(/^data: /, "");
  }
}

/** What `attempt` gives; the browser's errors of a connection become a Failure. */
async function connected(attempt) {
  try {
    return await attempt();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("lost", "The connection to the server is lost. See that it runs.");
  }
}

async function refusal(reply) {
  const waitS = Number(reply.headers.get("retry-after")) || 0;
  let told = null;
  try {
    told = (await reply.json()).error.message;
  } catch {
    told = reply.statusText || "the server gives no reason";
  }
  const { status } = reply;
  if (status === 401) return new Failure("key", `The server asks for an API key (401: ${told}). Enter it in the settings.`);
  if (status === 429) return new Failure("busy", `The server is full (429: ${told}).`, waitS || 2);
  if (status === 503) return new Failure("busy", `The server is not ready (503: ${told}).`, waitS || 2);
  return new Failure("refused", `The server refuses the request (${status}: ${told}).`);
}

/** An error that came inside a stream. */
function failureOf(error) {
  const kind = error.type === "service_unavailable_error" ? "busy" : "refused";
  return new Failure(kind, `The answer broke off: ${error.message}.`, 2);
}
