// The conversation: turns, what of them the model is sent, the comparison with plain decoding.

import { Answer, grown } from "./answer.js";
import { shownRate } from "./figures.js";
import { PLAIN } from "./settings.js";

/** What a way to draft is called on the page. model: what the server told of itself, null before it has. */
export function nameOf(drafting, model) {
  const own = model?.speculation ?? {};
  const drafter = drafting.drafter ?? own.drafter ?? "speculation";
  const number = drafting.num_spec_tokens ?? (drafter === own.drafter ? own.num_spec_tokens : undefined);
  return drafter === "none" ? "plain decoding" : number ? `${drafter} of ${number}` : drafter;
}

/** Turns and their answers. `running` is called with whether an answer is being written, `said` with what a screen
 * reader should say, `failed` with a failure that the settings can mend. */
export class Conversation {
  constructor(list, templates, { settings, model, running, said, failed }) {
    Object.assign(this, { list, templates, settings, model, running, said, failed });
    this.turns = [];
    this.controller = null; // of the answer that is being written
  }

  get isRunning() {
    return this.controller !== null;
  }

  /** Send a message and show the answer, or two: with speculation and without. */
  async send(prompt, isCompared) {
    const element = this.templates.turn.content.firstElementChild.cloneNode(true);
    element.querySelector(".prompt").textContent = prompt;
    const turn = { prompt, isCompared, element, answers: [] };
    this.turns.push(turn);
    this.list.append(element);
    element.addEventListener("click", ({ target }) => {
      if (target.closest(".again, .retry") && !this.isRunning) this.answer(turn);
    });
    await this.answer(turn);
  }

  /** Answer a turn, instead of the answers that it has. */
  async answer(turn) {
    const { settings } = this;
    const messages = this.#before(turn);
    const seed = settings.seed;
    const ways = turn.isCompared ? [settings.drafting(true), PLAIN] : [settings.drafting()];
    turn.answers = ways.map((way) => new Answer(nameOf(way, this.model()), this.templates.answer));
    turn.element.classList.toggle("compared", turn.isCompared);
    turn.element.querySelector(".answers").replaceChildren(...turn.answers.map((answer) => answer.element));
    turn.element.querySelector(".verdict").hidden = true;
    const controller = (this.controller = new AbortController());
    this.running(true);
    grown(turn.element);
    this.said("The model writes.");
    let failure = null;
    try {
      // One after the other: at the same time they would share the engine, and neither speed would be its own.
      for (const [place, answer] of turn.answers.entries()) {
        if (failure || controller.signal.aborted) break;
        failure = await answer.fill(settings.request(messages, seed, ways[place]), settings.key, controller.signal);
      }
    } finally {
      if (this.controller === controller) {
        this.controller = null;
        this.running(false);
      }
    }
    if (this.turns.includes(turn)) this.#conclude(turn, failure);
  }

  /** End what is being written; its text so far stays. */
  stop() {
    this.controller?.abort();
  }

  /** Begin anew. */
  clear() {
    this.stop();
    this.controller = null;
    this.turns = [];
    this.list.replaceChildren();
    this.running(false);
  }

  /** The messages that lead to a turn's answer; turns without an answer are as if never sent. */
  #before(turn) {
    const messages = [];
    for (const { prompt, answers } of this.turns.slice(0, this.turns.indexOf(turn))) {
      const text = answers[0].text;
      if (text) messages.push({ role: "user", content: prompt }, { role: "assistant", content: text });
    }
    return [...messages, { role: "user", content: turn.prompt }];
  }

  #conclude(turn, failure) {
    const [first] = turn.answers;
    if (failure) {
      if (failure.kind === "key") this.failed(failure);
      return;
    }
    const verdict = turn.isCompared ? verdictOf(turn.answers) : "";
    const shown = turn.element.querySelector(".verdict");
    shown.textContent = verdict;
    shown.hidden = !verdict;
    this.said(`${first.isWhole ? "The answer:" : "Stopped:"} ${first.text}\n${verdict}`);
    grown(turn.element);
  }
}

/** What a comparison showed, in words. */
function verdictOf([drafted, plain]) {
  if (!drafted.isWhole || !plain.isWhole) return "Identical: not known, for not both are whole.";
  const place = firstDifference(drafted.reasoning + drafted.text, plain.reasoning + plain.text);
  const same = place === null && drafted.finish === plain.finish;
  const identical = same ? "Identical: yes." : `Identical: no, from character ${place ?? plain.text.length} on.`;
  const rates = [drafted, plain].map((answer) => answer.meter.rate);
  if (rates.includes(null)) return identical;
  const ratio = rates[0] / rates[1];
  return `${identical} ${shownRate(rates[0])} tok/s beside ${shownRate(rates[1])}: ${ratio.toFixed(2)} times as fast.`;
}

function firstDifference(a, b) {
  if (a === b) return null;
  let place = 0;
  while (a[place] === b[place]) place += 1;
  return place;
}
