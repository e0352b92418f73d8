// The kernels: what each was made of, its GLSL and SPIR-V.
const WORDS = new RegExp([
  "(//[^\\n]*|/\\*[\\s\\S]*?\\*/)", // comments
  "(^[ \\t]*#[^\\n]*)", // preprocessor
  "(\\b(?:void|bool|u?int|float|double|float16_t|u?int\\d+_t|[biu]?vec[234]|f16vec[234]|u?i?\\d*vec[234]|mat[234]|const|in|out|inout|uniform|buffer|shared|readonly|writeonly|restrict|layout|struct|if|else|for|while|do|return|break|continue|discard|true|false)\\b)",
  "(\\b\\d[\\w.]*\\b)",
].join("|"), "gm");

// GLSL with colours.
function glsl(text) {
  const made = h("pre", { class: "code", tabindex: 0 });
  let last = 0;
  for (const match of text.matchAll(WORDS)) {
    made.append(text.slice(last, match.index));
    const kind = ["comment", "directive", "word", "number"][match.slice(1).findIndex((part) => part !== undefined)];
    made.append(h("span", { class: kind }, match[0]));
    last = match.index + match[0].length;
  }
  made.append(text.slice(last));
  return made;
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && !(Array.isArray(value) && !value.length))
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function kernelDetail(page, kernel) {
  const { spirv } = kernel;
  // Those that say which parameters are push constants come last.
  const pushed = ([name]) => Number(name.startsWith("PUSH_"));
  const macros = [...kernel.macros].sort((a, b) => pushed(a) - pushed(b)).map(([name, value]) => `#define ${name} ${value}`).join("\n");
  const texts = h("div", { class: "texts" });
  const shown = h("div", { class: "shown" });
  const choices = [["macros", macros], ...kernel.files.map(([name, key], at) => [at ? name : `${name} (template)`, page.data.files[key]])];
  const pick = (at) => {
    [...texts.children].forEach((child, number) => child.setAttribute("aria-pressed", number === at));
    shown.replaceChildren(glsl(choices[at][1]));
    shown.firstChild.classList.toggle("wrapped", at === 0);
  };
  choices.forEach(([name], at) => texts.append(h("button", { type: "button", onclick: () => pick(at) }, name)));
  pick(kernel.macros.length ? 0 : 1);
  return h("div", { class: "kernel" },
    facts([
      ["SPIR-V", spirv ? `${bytes(spirv.nbytes)}, version ${spirv.version}` : "not compiled: there is no device"],
      ["instructions", spirv && `${spirv.instructions}: ${Object.entries(spirv.classes).map(([name, number]) => `${name} ${number}`).join(", ")}`],
      ["shared memory", spirv && spirv.shared ? count(spirv.shared, "variable") : null],
      ["capabilities", spirv && spirv.capabilities.join(", ")],
      ["subgroup size", kernel.subgroup_size],
      ["bindings", kernel.bindings.join(", ")],
      ["constants", kernel.constants.map(([number, name, value]) => `${name || number} = ${value}`).join(", ")],
    ]),
    h("p", { class: "quiet" }, "The kernel is the template, with these macros defined and the other files included."),
    texts, shown);
}

function kernelTable(page) {
  const rows = page.kernels.map((kernel, number) => {
    const uses = page.uses.get(number) || [];
    const calls = uses.filter((use) => use.node.on !== "load");
    const time = total(calls, (use) => use.each.runs * (use.each.seconds || 0));
    const moved = total(calls, (use) => use.each.runs * use.each.bytes);
    const least = page.limits ? total(calls, (use) => page.least(use.each)) : 0;
    return {
      kernel, number, uses, calls: calls.length, once: uses.length - calls.length, time: time || null, moved,
      share: time && least ? least / time : null, cost: total(calls, (use) => page.costOf(use.each)),
      runs: [...new Set(uses.map((use) => use.node.label))],
    };
  }).filter((row) => row.uses.length);
  const byNumber = new Map();
  let opened = null;
  const columns = [
    { name: "kernel", kind: "name whole", of: (row) => row.kernel.template, show: (row) => [h("i", { class: "dot", style: { background: page.colours.get(family(row.kernel.template)) } }), h("b", {}, stem(row.kernel.template)), h("small", {}, ` #${row.number}`)] },
    { name: "computes", kind: "runs", wide: true, of: (row) => row.runs.join("; "), show: (row) => shortened(row.runs.join("; "), 90) },
    { name: "dispatches", number: true, of: (row) => row.calls || null, show: (row) => [row.calls || "", row.once ? h("small", { class: row.calls ? "more" : "" }, ` ${row.calls ? "+ " : ""}${row.once} at load`) : null] },
    page.unit === "time"
      ? { name: "time", number: true, of: (row) => row.time, show: (row) => row.time && seconds(row.time) }
      : { name: "bytes", number: true, of: (row) => row.moved || null, show: (row) => row.moved ? bytes(row.moved) : "" },
    { name: "share", number: true, of: (row) => row.cost, show: (row) => row.cost ? [bar(row.cost / page.whole, page.colours.get(family(row.kernel.template))), h("span", { class: "beside" }, percent(row.cost / page.whole))] : "" },
    page.limits && { name: "of limit", number: true, wide: true, of: (row) => row.share, show: (row) => row.share && percent(row.share) },
    { name: "SPIR-V", number: true, wide: true, of: (row) => row.kernel.spirv ? row.kernel.spirv.instructions : null, show: (row) => row.kernel.spirv && `${row.kernel.spirv.instructions} instr.` },
  ].filter(Boolean);
  const pick = (row, line) => {
    if (opened) {
      const same = opened.line === line;
      opened.below.remove();
      opened.line.classList.remove("opened");
      opened = null;
      if (same) return;
    }
    const below = h("tr", { class: "detail" }, h("td", { colspan: [...line.cells].filter((cell) => cell.offsetWidth).length }, kernelDetail(page, row.kernel)));
    line.after(below);
    line.classList.add("opened");
    opened = { line, below };
  };
  const made = table(columns, rows, { order: columns.findIndex((column) => column.name === "share"), pick, mark: (row, line) => byNumber.set(row.number, { row, line }) });
  page.openKernel = (number) => {
    const { row, line } = byNumber.get(number);
    if (!opened || opened.line !== line) pick(row, line);
    line.scrollIntoView({ block: "start", behavior: "smooth" });
  };
  return made;
}
