type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined>;

function fill(element: Element, attributes: Attributes, children: Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
}

/** An HTML element. */
export function h<K extends keyof HTMLElementTagNameMap>(name: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(name);
  fill(element, attributes, children);
  return element;
}

/** An SVG element. */
export function svg<K extends keyof SVGElementTagNameMap>(name: K, attributes: Attributes = {}, ...children: Child[]): SVGElementTagNameMap[K] {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  fill(element, attributes, children);
  return element;
}

/** The element of the page with this id, which must be there. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element "${id}"`);
  return element as T;
}

/** A group of radio buttons drawn as one segmented switch. */
export function segments<V extends string>(
  options: { legend: string; name: string; choices: readonly (readonly [V, string])[]; value: V; hideLegend?: boolean },
  chosen: (value: V) => void,
): HTMLFieldSetElement {
  const inputs = options.choices.map(([value, label]) => {
    const input = h("input", { type: "radio", name: options.name, value, checked: value === options.value });
    input.addEventListener("change", () => input.checked && chosen(value));
    return h("label", {}, input, h("span", {}, label));
  });
  const legend = h("legend", { class: options.hideLegend ? "unseen" : null }, options.legend);
  return h("fieldset", { class: "segments" }, legend, h("div", {}, ...inputs));
}

/** A table whose first column names its rows. */
export function table(caption: string, head: readonly string[], rows: readonly (readonly (string | number)[])[]): HTMLTableElement {
  const numeric = (cell: string | number) => typeof cell === "number" || /^[\d.,−-]+( |$)/.test(cell);
  return h(
    "table",
    {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...head.map((cell) => h("th", { scope: "col" }, cell)))),
    h(
      "tbody",
      {},
      ...rows.map((row) =>
        h("tr", {}, ...row.map((cell, at) =>
          at === 0 ? h("th", { scope: "row" }, String(cell)) : h("td", { class: numeric(cell) ? "number" : null }, String(cell)))),
      ),
    ),
  );
}

/** A closed fold with a table inside, made anew whenever it is opened, before it shows: `toggle` comes after. */
export function tableFold(label: string, make: () => HTMLElement): HTMLDetailsElement {
  const box = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label });
  const summary = h("summary", {}, label);
  const fold = h("details", { class: "table-fold" }, summary, box);
  summary.addEventListener("click", () => fold.open || box.replaceChildren(make()));
  return fold;
}

/** Calls back once per frame at most, with the last call's arguments. */
export function perFrame<A extends unknown[]>(act: (...args: A) => void): (...args: A) => void {
  let waiting: A | null = null;
  return (...args) => {
    const scheduled = waiting !== null;
    waiting = args;
    if (scheduled) return;
    requestAnimationFrame(() => {
      const now = waiting!;
      waiting = null;
      act(...now);
    });
  };
}
