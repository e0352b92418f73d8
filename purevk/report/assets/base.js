// Makes elements, and shows numbers. Text goes into a page as text nodes alone: names come from files.
const SVG = "http://www.w3.org/2000/svg";

function make(namespace, tag, properties, children) {
  const element = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}
const h = (tag, properties, ...children) => make(null, tag, properties, children);
const s = (tag, properties, ...children) => make(SVG, tag, properties, children);

const digits = (number, most = 3) =>
  number >= 100 ? number.toFixed(0) : Number(number.toPrecision(most)).toString();
function scaled(number, step, units) {
  let at = 0;
  while (number >= step && at < units.length - 1) {
    number /= step;
    at += 1;
  }
  return `${digits(number)} ${units[at]}`;
}
const bytes = (number) => scaled(number, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const operations = (number) => scaled(number, 1000, ["flop", "kflop", "Mflop", "Gflop", "Tflop"]);
const rate = (number, unit) => scaled(number / 1e9, 1000, [`G${unit}`, `T${unit}`]);
const seconds = (number) => scaled(number * 1e9, 1000, ["ns", "µs", "ms", "s"]);
const percent = (share) => share > 0 && share < 0.0005 ? "< 0.1 %" : `${digits(100 * share, share < 0.1 ? 2 : 3)} %`;
const count = (number, word) => `${number} ${number === 1 ? word : word.endsWith("ch") ? `${word}es` : `${word}s`}`;
const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const stem = (template) => template.split("/").pop().replace(/\.comp$/, "");
const family = (template) => (template.includes("/") ? template.split("/")[0] : "your own");
const total = (items, of) => items.reduce((sum, item) => sum + of(item), 0);

// A table that sorts by a click on a column's name.
// columns: {name, of (a row: what it sorts by), show (a row: text or element), number, wide}.
function table(columns, rows, options = {}) {
  let order = options.order || null;
  let down = true;
  const most = options.most || Infinity;
  let all = false;
  const body = h("tbody");
  const heads = columns.map((column, at) =>
    h("th", { class: [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ") },
      column.name === "" ? "" : h("button", { type: "button", onclick: () => sort(at) }, column.name)));
  const more = h("button", { type: "button", class: "more", onclick: () => { all = true; fill(); } });
  function sort(at) {
    down = order === at ? !down : Boolean(columns[at].number);
    order = at;
    fill();
  }
  function fill() {
    let sorted = rows;
    if (order !== null) {
      const of = columns[order].of;
      const compare = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1
        : (typeof a === "number" ? a - b : String(a).localeCompare(String(b))) * (down ? -1 : 1));
      sorted = [...rows].sort((a, b) => compare(of(a), of(b)));
    }
    heads.forEach((head, at) => {
      if (at === order) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...(all ? sorted : sorted.slice(0, most)).map(line));
    more.hidden = all || sorted.length <= most;
    more.textContent = `show all ${sorted.length}`;
  }
  function line(row) {
    const cells = columns.map((column) => {
      const shown = column.show ? column.show(row) : column.of(row);
      return h("td", { class: [column.number ? "number" : "", column.wide ? "wide" : "", column.kind || ""].join(" ") },
        shown === null ? "" : shown);
    });
    const made = h("tr", options.pick ? {
      class: "pick", tabindex: 0, onclick: () => options.pick(row, made),
      onkeydown: (event) => { if (event.key === "Enter" && event.target === made) options.pick(row, made); },
    } : {}, cells);
    if (options.mark) options.mark(row, made);
    return made;
  }
  fill();
  const whole = h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
  return h("div", { class: "table" }, whole, more);
}

const bar = (share, colour) =>
  h("span", { class: "bar" }, h("i", { style: { width: `${Math.max(100 * share, 0.5)}%`, background: colour } }));

// One box with text that follows the pointer.
const tip = h("div", { class: "tip", role: "status", hidden: true });
function hover(element, lines) {
  const show = (event) => {
    tip.replaceChildren(...lines().filter(Boolean).map((text, at) => h(at ? "div" : "b", {}, text)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
    tip.style.left = `${Math.max(x, 8)}px`;
    tip.style.top = `${Math.max(y, 8)}px`;
  };
  element.addEventListener("pointermove", show);
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
  return element;
}
