// Tokens as elements: marked by who wrote them, code between ``` fences in blocks of its own. The text content of the
// element is the model's text, character for character, and is only ever set as text.

const MAY_BE_FENCE = /^ {0,3}`{0,2}$/;
const FENCE = /^ {0,3}```/;

/** Writes tokens into an element. `add` is cheap; `paint` changes the page, so it is called once a frame. */
export class Writing {
  constructor(root) {
    this.root = root;
    this.waiting = []; // tokens that are not painted
    this.line = ""; // the current line so far, as long as it may still become a fence
    this.isLineOpen = true; // whether it may
    this.held = []; // pieces of that line
    this.block = null;
    this.isFenceOpen = false; // whether the current block is code that no fence has closed
    this.isClosing = false; // whether the current line is the fence that closes it
  }

  /** Tokens: {text, by}. */
  add(entries) {
    this.waiting.push(...entries);
  }

  /** Show what was added. */
  paint() {
    for (const { text, by } of this.waiting) for (const piece of text.split(/(?<=\n)/)) this.#piece(piece, by);
    this.waiting = [];
  }

  /** Show all of it, an unfinished line too. */
  end() {
    this.paint();
    this.#release();
  }

  #piece(piece, by) {
    if (this.isLineOpen) {
      this.held.push([piece, by]);
      this.line += piece;
      if (MAY_BE_FENCE.test(this.line)) return;
      this.isLineOpen = false;
      if (FENCE.test(this.line)) this.#fence();
      this.#release();
    } else {
      this.#append(piece, by);
    }
    if (piece.endsWith("\n")) this.#newLine();
  }

  #fence() {
    if (this.isFenceOpen) {
      this.isClosing = true;
    } else {
      this.block = null;
      this.isFenceOpen = true;
    }
  }

  #newLine() {
    if (this.isClosing) {
      this.block = null;
      this.isFenceOpen = this.isClosing = false;
    }
    this.line = "";
    this.isLineOpen = true;
  }

  #release() {
    for (const [piece, by] of this.held) this.#append(piece, by);
    this.held = [];
  }

  /** Blanks in front of a run of one writer's words and line ends carry no mark: below nothing it would be noise. */
  #append(piece, by) {
    if (!this.block) {
      this.block = document.createElement(this.isFenceOpen ? "pre" : "div");
      this.root.append(this.block);
    }
    const [, blanks, words, end] = /^([ \t]*)([^]*?)(\n?)$/.exec(piece);
    const isRunning = words && this.block.lastChild?.dataset?.by === by;
    this.#put(blanks, isRunning ? by : null);
    this.#put(words, by);
    this.#put(end, null);
  }

  #put(text, by) {
    if (!text) return;
    const last = this.block.lastChild;
    if (by === null) {
      if (last instanceof Text) last.appendData(text);
      else this.block.append(text);
    } else if (last?.dataset?.by === by) {
      last.firstChild.appendData(text);
    } else {
      const span = document.createElement("span");
      span.className = "by";
      span.dataset.by = by;
      span.textContent = text;
      this.block.append(span);
    }
  }
}
