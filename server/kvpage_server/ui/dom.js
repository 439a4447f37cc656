// Elements are made here and nowhere else. What comes from the server is only ever text.

export const byId = (id) => document.getElementById(id);

/** `make("td", {class: "number"}, "12")`. Properties that begin with `on` are listeners; null and false are left out. */
export function make(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function makeSvg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table's head and rows. `columns`: texts, or `{text, number, quiet}`; a quiet one is read out, not shown. */
export function fillTable(table, columns, rows) {
  const heads = columns.map((column) => {
    const { text, number, quiet } = typeof column === "string" ? { text: column } : column;
    const shown = quiet ? make("span", { class: "visually-hidden" }, text) : text;
    return make("th", { scope: "col", class: number ? "number" : null }, shown);
  });
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, place) => asCell(cell, columns[place]))));
  table.replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
}

function asCell(cell, column) {
  if (cell instanceof HTMLTableCellElement) return cell;
  return make("td", { class: column && column.number ? "number" : null }, cell);
}

/** Part of a whole as a bar. The number stands beside it as text, so readers of the screen leave it out. */
export function bar(parts) {
  const whole = make("div", { class: "meter", "aria-hidden": "true" });
  for (const [kind, share] of parts) {
    const piece = make("span", { class: kind });
    piece.style.inlineSize = `${Math.min(100, 100 * share)}%`; // by the object model, which the policy allows
    whole.append(piece);
  }
  return whole;
}

/** Sets the text only when it differs, so that a selection and a screen reader are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
