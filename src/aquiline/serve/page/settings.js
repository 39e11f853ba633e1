// The settings: fields of the form, what of them is kept in the browser, and the request that they describe.

const KEPT = "aquiline.settings";
const KEY = "aquiline.key";
/** How a request asks for plain decoding. */
export const PLAIN = { drafter: "none" };
const SAMPLING = ["temperature", "top_p", "max_tokens"];

/** The form of settings. Fields are kept between visits, the API key until the tab is closed. */
export class Settings {
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    this.#restore();
    form.addEventListener("input", () => this.#keep());
    form.addEventListener("reset", () => {
      const { value } = this.fields.key; // no setting in the sense of this button
      setTimeout(() => {
        this.fields.key.value = value;
        this.#keep();
      });
    });
    this.#enable();
  }

  get key() {
    return this.fields.key.value.trim();
  }

  /** A seed that is the user's, or a new one: so that every answer can be asked for again. */
  get seed() {
    const given = this.fields.seed.value;
    return given === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(given);
  }

  /** The first field that does not hold what it must, or null. */
  get wrong() {
    return [...this.fields].find((field) => field.willValidate && !field.checkValidity()) ?? null;
  }

  /** How a request is drafted; fields that are missing are the server's. */
  drafting(isEnabled = this.fields.enabled.checked) {
    if (!isEnabled) return PLAIN;
    const { drafter, num_spec_tokens } = this.fields;
    const asked = {};
    if (drafter.value) asked.drafter = drafter.value;
    if (num_spec_tokens.value && !num_spec_tokens.disabled) asked.num_spec_tokens = Number(num_spec_tokens.value);
    return asked;
  }

  /** The body of a request for an answer to messages. */
  request(messages, seed, drafting) {
    const system = this.fields.system.value.trim();
    const body = {
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true, stream_options: { include_usage: true }, return_token_sources: true,
      seed, ...drafting,
    };
    for (const name of SAMPLING) if (this.fields[name].value !== "") body[name] = Number(this.fields[name].value);
    return body;
  }

  #enable() {
    const { enabled, drafter, num_spec_tokens } = this.fields;
    drafter.disabled = !enabled.checked;
    num_spec_tokens.disabled = !enabled.checked || ["static", "dynamic"].includes(drafter.value); // trees have sizes of their own
    document.body.classList.toggle("unmarked", !this.fields.marks.checked);
    document.body.classList.toggle("prose", this.fields.type.value === "prose");
  }

  #keep() {
    const kept = {};
    for (const field of this.fields)
      if (field.name) kept[field.name] = field.type === "checkbox" ? field.checked : field.value;
    stored(() => localStorage.setItem(KEPT, JSON.stringify(kept)));
    stored(() => sessionStorage.setItem(KEY, this.fields.key.value));
    this.#enable();
  }

  #restore() {
    const kept = stored(() => JSON.parse(localStorage.getItem(KEPT))) ?? {};
    for (const [name, value] of Object.entries(kept)) {
      const field = this.fields[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
    }
    this.fields.key.value = stored(() => sessionStorage.getItem(KEY)) ?? "";
  }
}

/** What `access` gives; null in a browser that keeps nothing, or where something else was kept. */
function stored(access) {
  try {
    return access();
  } catch {
    return null;
  }
}
