// What an answer cost: tokens by who wrote them, tau, tokens per second. Knows nothing of the page.

/** Counts one answer while its chunks come. Times are in milliseconds. */
export class Meter {
  constructor(beganMs) {
    this.beganMs = beganMs;
    this.firstMs = null;
    this.lastMs = null;
    this.numFirst = 0; // tokens of the first chunk: they came before the clock of the rate began
    this.numTokens = 0;
    this.written = { draft: 0, lookup: 0, target: 0 };
    this.drafting = { num_steps: 0, num_committed: 0 };
  }

  /** A chunk's entries (one per token) and the totals of drafting that it brings. */
  add(entries, drafting, nowMs) {
    for (const { by } of entries) this.written[by] += 1;
    this.numTokens += entries.length;
    if (drafting) this.drafting = drafting;
    if (!entries.length) return;
    if (this.firstMs === null) {
      this.firstMs = nowMs;
      this.numFirst = entries.length;
    }
    this.lastMs = nowMs;
  }

  /** Tokens that a decode step gives on average, whether it drafted or not; 1 without a draft. */
  get tau() {
    const { num_steps, num_committed } = this.drafting;
    return num_steps ? num_committed / num_steps : 1;
  }

  /** Tokens per second behind the first chunk, so that the prompt's time is not in it; null before there are any. */
  get rate() {
    const ms = this.lastMs - this.firstMs;
    return ms > 0 ? (1000 * (this.numTokens - this.numFirst)) / ms : null;
  }

  /** Milliseconds from the request to the first chunk; null before it. */
  get firstAfterMs() {
    return this.firstMs === null ? null : this.firstMs - this.beganMs;
  }

  /** The share of the tokens with text that one of the writers wrote. */
  share(by) {
    const { draft, lookup, target } = this.written;
    return this.written[by] / Math.max(1, draft + lookup + target);
  }
}

export const shownRate = (rate) => (rate === null ? "–" : rate < 10 ? rate.toFixed(1) : rate.toFixed(0));
export const shownShare = (share) => `${Math.round(100 * share)}\u202f%`;
export const shownTime = (ms) => (ms === null ? "–" : ms < 1000 ? `${Math.round(ms)}\u202fms` : `${(ms / 1000).toFixed(1)}\u202fs`);
