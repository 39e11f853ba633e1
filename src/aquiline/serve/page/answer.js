// One answer on the page: its text as it comes, its figures, what went wrong.

import { Failure, streamed } from "./api.js";
import { Meter, shownRate, shownShare, shownTime } from "./figures.js";
import { Writing } from "./writing.js";

const MAX_RETRIES = 5;
const FIGURES_MS = 150; // figures that change more often cannot be read
const ENDS = { stop: "", length: "cut at the limit", tool_calls: "a call of a tool", deadline: "out of time" };

/** Tell the page that an element has become longer, so that it can keep the end in view. */
export const grown = (element) => element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));

/** An answer and its element. `text` is what the model wrote; `isWhole` whether it ended by itself. */
export class Answer {
  constructor(name, template) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.#find(".way").textContent = name;
    this.#find(".copy").addEventListener("click", () => this.#copy());
    this.#clear();
  }

  /** Ask for the answer. A server that is busy is asked again after the time that it names. */
  async fill(request, key, signal) {
    for (let attempt = 0; ; attempt += 1) {
      this.#clear();
      const failure = await this.#attempt(request, key, signal);
      if (failure === null || failure.kind !== "busy" || this.text || attempt === MAX_RETRIES) return failure;
      if (!(await this.#wait(failure, signal))) return failure;
    }
  }

  async #attempt(request, key, signal) {
    this.meter = new Meter(performance.now());
    this.element.setAttribute("aria-busy", "true");
    this.#figure("seed", request.seed);
    let failure = null;
    try {
      for await (const chunk of streamed(request, key, signal)) this.#take(chunk);
      this.isWhole = true;
    } catch (error) {
      if (error instanceof Failure) failure = error;
      else if (error.name !== "AbortError") throw error;
    } finally {
      this.#end(signal.aborted);
    }
    if (failure) this.#tell(failure.message);
    return failure;
  }

  #clear() {
    this.text = this.reasoning = "";
    this.isWhole = false;
    this.finish = null;
    this.meter = null;
    this.frame = null;
    this.figuresMs = 0;
    this.channels = {};
    for (const [channel, css] of [["content", ".content"], ["reasoning", ".reasoning .text"]]) {
      this.#find(css).replaceChildren();
      this.channels[channel] = new Writing(this.#find(css));
    }
    for (const css of [".reasoning", ".problem", "footer"]) this.#find(css).hidden = true;
    this.#figure("end", "");
  }

  #take({ choices, usage }) {
    if (usage) this.meter.numTokens = usage.completion_tokens; // the count that is exact: special tokens have no text
    const [choice] = choices;
    if (!choice) return;
    const entries = choice.delta.sources ?? [];
    this.meter.add(entries, choice.drafting, performance.now());
    for (const entry of entries) {
      if (entry.in === "reasoning") this.reasoning += entry.text;
      else this.text += entry.text;
      this.channels[entry.in].add([entry]);
    }
    this.finish = choice.finish_reason ?? this.finish;
    if (choice.stop_reason === "deadline") this.finish = "deadline";
    this.frame ??= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    this.frame = null;
    this.#find(".reasoning").hidden = !this.reasoning;
    for (const writing of Object.values(this.channels)) writing.paint();
    if (performance.now() - this.figuresMs > FIGURES_MS) this.#showFigures();
    grown(this.element);
  }

  #end(isStopped) {
    cancelAnimationFrame(this.frame);
    for (const writing of Object.values(this.channels)) writing.end();
    this.#paint();
    this.#showFigures();
    this.element.setAttribute("aria-busy", "false");
    if (isStopped) this.#figure("end", "stopped");
    else if (this.isWhole) this.#figure("end", this.text || this.reasoning ? ENDS[this.finish] : "ended without a text");
  }

  #showFigures() {
    const { meter } = this;
    if (!meter.numTokens) return;
    this.figuresMs = performance.now();
    this.#find("footer").hidden = false;
    this.#figure("tau", meter.tau.toFixed(2));
    this.#figure("rate", shownRate(meter.rate));
    this.#figure("tokens", meter.numTokens);
    this.#figure("first", shownTime(meter.firstAfterMs));
    for (const by of ["draft", "lookup"]) this.#figure(by, meter.share(by) ? shownShare(meter.share(by)) : "");
    for (const part of this.element.querySelectorAll(".shares i")) part.style.flexGrow = meter.share(part.dataset.by);
  }

  /** Whether the time that a busy server named has passed: "Try again" ends the wait, a stop ends all of it. */
  #wait({ waitS }, signal) {
    const untilMs = Date.now() + 1000 * waitS;
    const retry = this.#find(".retry");
    return new Promise((resolve) => {
      const done = (goesOn) => {
        clearInterval(timer);
        this.#find(".soon").textContent = "";
        retry.removeEventListener("click", now);
        signal.removeEventListener("abort", stop);
        resolve(goesOn);
      };
      const now = (event) => {
        event.stopPropagation();
        done(true);
      };
      const stop = () => done(false);
      const look = () => {
        const leftS = Math.ceil((untilMs - Date.now()) / 1000);
        this.#find(".soon").textContent = `Trying again in ${leftS}\u202fs.`;
        if (leftS <= 0) done(true);
      };
      const timer = setInterval(look, 250);
      retry.addEventListener("click", now);
      signal.addEventListener("abort", stop);
      look();
    });
  }

  #tell(message) {
    this.#find(".problem p").textContent = message;
    this.#find(".problem").hidden = false;
    grown(this.element);
  }

  async #copy() {
    const button = this.#find(".copy");
    try {
      await navigator.clipboard.writeText(this.text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(this.#find(".content"));
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  #figure(name, value) {
    const shown = this.#find(`[data-figure=${name}]`);
    shown.textContent = value;
    shown.parentElement.hidden = value === "";
  }

  #find(css) {
    return this.element.querySelector(css);
  }
}
