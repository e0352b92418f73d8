// The page: what belongs where.
const data = JSON.parse(document.getElementById("data").textContent);
const WHERE = {
  gpu: "on the GPU", cpu: "on the CPU", host: "on the host", load: "once, at load",
};
const HUES = 9;

class Page {
  constructor() {
    this.data = data;
    this.kernels = data.kernels;
    this.graph = new GraphView(this);
  }

  show(number) {
    this.method = data.methods[number];
    this.nodes = new Map();
    this.drawings = new Map();
    this.makers = new Map();
    this.uses = new Map();
    this.ordered = [];
    this.called = []; // with the nodes of sub-graphs
    this.collect(this.method.graph, true);
    this.unit = this.method.timed ? "time" : "bytes";
    this.limits = this.method.timed ? data.device.limits : null;
    const costs = this.ordered.map((node) => this.cost(node));
    this.whole = total(costs, (cost) => cost) || 1;
    this.largest = Math.max(...costs, 0) || 1;
    this.paint();
    this.fill();
  }

  collect(drawing, outer) {
    for (const segment of drawing.segments) {
      segment.nodes.forEach((node) => {
        node.on = segment.on;
        this.nodes.set(node.id, node);
        this.drawings.set(node.id, drawing);
        if (segment.on !== "load" && outer) this.ordered.push(node);
        if (segment.on !== "load") this.called.push(node);
        for (const each of node.dispatches) {
          if (outer && segment.on !== "load") this.makers.set(each.step, node);
          if (!this.uses.has(each.kernel)) this.uses.set(each.kernel, []);
          this.uses.get(each.kernel).push({ node, each });
        }
        node.graphs.forEach((inner) => this.collect(inner, false));
      });
    }
  }

  // A colour for each family of templates, the one that costs most first.
  paint() {
    const costs = new Map();
    for (const node of this.nodes.values()) {
      for (const each of node.dispatches) {
        const name = this.familyOf(each);
        costs.set(name, (costs.get(name) || 0) + (node.on === "load" ? 0 : this.costOf(each)));
      }
    }
    this.families = [...costs].sort((a, b) => b[1] - a[1]);
    this.colours = new Map(this.families.map(([name], at) => [name, `var(--c${at % HUES})`]));
  }

  colourOf(node) {
    if (node.on === "cpu") return "var(--cpu)";
    if (node.on === "host") return "var(--host)";
    const last = [...node.dispatches].sort((a, b) => b.bytes - a.bytes)[0];
    return last ? this.colours.get(this.familyOf(last)) : "var(--muted)";
  }

  // Of one dispatch: the family of its template, and what it costs.
  familyOf(each) { return family(this.kernels[each.kernel].template); }
  costOf(each) { return each.runs * (this.unit === "time" ? each.seconds || 0 : each.bytes); }

  node(id) { return this.nodes.get(id); }
  // With what runs in its sub-graphs, in all their runs.
  within(node, of) {
    const inner = node.graphs.flatMap((graph) => graph.segments).filter((each) => each.on !== "load").flatMap((each) => each.nodes);
    return of(node) + total(inner, (each) => this.within(each, of));
  }
  time(node) { return this.within(node, (one) => (one.seconds || 0) + total(one.dispatches, (each) => each.runs * (each.seconds || 0))); }
  moved(node) { return this.within(node, (one) => total(one.dispatches, (each) => each.runs * each.bytes)); }
  work(node) { return this.within(node, (one) => total(one.dispatches, (each) => each.runs * each.flops)); }
  cost(node) { return node.on === "load" ? 0 : this.unit === "time" ? this.time(node) : this.moved(node); }
  least(each) {
    const { bytes_per_second: memory, flops_per_second: work } = this.limits;
    return each.runs * Math.max(each.bytes / memory, each.flops / work);
  }
  limitOf(node) {
    const time = this.time(node);
    if (!this.limits || !time || !node.dispatches.length) return null;
    const bound = node.bytes / this.limits.bytes_per_second >= node.flops / this.limits.flops_per_second ? "memory" : "arithmetic";
    return { share: total(node.dispatches, (each) => this.least(each)) / time, bound };
  }

  // What the box beside the pointer says of a node.
  lines(node) {
    const time = this.time(node);
    const limit = this.limitOf(node);
    return [
      node.label, node.path.join("."), node.results.map((each) => each.type).join(", "),
      node.on === "gpu" ? null : WHERE[node.on], node.why,
      time ? `${seconds(time)}, ${percent(time / this.whole)} of the call` : null,
      this.moved(node) ? `${bytes(this.moved(node))} moved, ${operations(this.work(node))}` : null,
      limit ? `${percent(limit.share)} of what ${limit.bound} allows` : null,
    ];
  }

  *texts() {
    const { drawing } = this.graph;
    for (const each of [...drawing.inputs, ...drawing.states, ...drawing.outputs]) yield [each.id, `${each.name} ${each.type}`.toLowerCase()];
    for (const segment of drawing.segments) {
      for (const node of segment.nodes) {
        const results = node.results.flatMap((each) => [each.name, each.type]);
        yield [node.id, [node.label, node.operator, node.source, node.line || "", node.why || "", ...results, ...node.constants, WHERE[node.on]].join(" ").toLowerCase()];
      }
    }
  }

  named(id) {
    const node = this.nodes.get(id);
    if (node) return [node.label, node.path.join(".") || node.source];
    const { drawing } = this.graph;
    const end = [...drawing.inputs, ...drawing.states, ...drawing.outputs].find((each) => each.id === id);
    return end ? [end.name, end.type] : [id, ""];
  }

  select(id, scroll) {
    if (this.graph.moved) return;
    tip.hidden = true;
    const drawing = this.drawings.get(id);
    if (drawing && drawing !== this.graph.drawing) {
      this.graph.show(this.method.graph);
      if (drawing !== this.method.graph) this.graph.enter(drawing);
    }
    this.graph.select(id, scroll);
    this.graph.details(this.details(id));
    if (scroll) document.getElementById("graph").scrollIntoView({ behavior: "smooth" });
  }

  // -- what the panel beside the graph says -------------------------------------------------------
  details(id) {
    const node = this.nodes.get(id);
    const { drawing } = this.graph;
    const link = (other, value) => h("button", { type: "button", class: "link", onclick: () => this.select(other) },
      this.named(other)[0], value && h("small", {}, ` ${value}`));
    const reads = drawing.edges.filter((edge) => edge.to === id);
    const used = drawing.edges.filter((edge) => edge.from === id);
    const once = (edges, end) => [...new Map(edges.map((edge) => [`${edge[end]} ${edge.value}`, edge])).values()];
    const around = [
      ["reads", once(reads, "from").map((edge) => link(edge.from, edge.type))],
      ["read by", once(used, "to").map((edge) => link(edge.to, edge.type === "written" ? "written" : ""))],
    ];
    if (!node) {
      const [name, type] = this.named(id);
      return [h("h3", {}, name), facts([["type", h("code", {}, type)], ...around])];
    }
    const time = this.time(node);
    const limit = this.limitOf(node);
    const known = new Map(drawing.constants.map((each) => [each.name, each]));
    return [
      h("h3", {}, node.label),
      h("p", {}, h("span", { class: `chip on-${node.on}` }, WHERE[node.on]), node.why && h("span", { class: "why" }, ` ${node.why}`)),
      time > 0 && h("div", { class: "big" }, h("b", {}, seconds(time)), ` ${percent(time / this.whole)} of the call`,
        limit && h("small", {}, `, ${percent(limit.share)} of the limit (${limit.bound})`)),
      facts([
        ["module", node.path.join(".")],
        ["from", node.source],
        ["code", node.line],
        ["operator", h("code", {}, node.operator)],
        ["computes", node.operators.length > 1 ? node.operators.join(" → ") : null],
        ["results", node.results.map((each) => h("div", {}, each.name, " ", h("code", {}, each.type)))],
        ...around,
        ["weights", this.weightsOf(node, drawing).map((name) => h("div", {}, name, " ", h("code", {}, known.has(name) ? known.get(name).type : "")))],
        ["moves", this.moved(node) ? bytes(this.moved(node)) : null],
        ["computes", this.work(node) ? operations(this.work(node)) : null],
        ["sub-graphs", node.graphs.map((inner) => h("button", { type: "button", class: "link", onclick: () => this.graph.enter(inner) }, `${inner.name} (${count(total(inner.segments, (each) => each.nodes.length), "node")})`))],
        ["dispatches", node.dispatches.map((each) => h("div", { class: "dispatch" },
          h("button", { type: "button", class: "link", onclick: () => this.openKernel(each.kernel) }, `${stem(this.kernels[each.kernel].template)} #${each.kernel}`),
          h("small", {}, ` grid ${each.grid.join(" × ")}${each.seconds ? `, ${seconds(each.seconds)}` : ""}${each.runs > 1 ? `, ${each.runs} runs` : ""}`)))],
      ]),
    ];
  }

  // The constants that a node reads, as they are or through nodes that run at load.
  weightsOf(node, drawing) {
    const names = new Set();
    const seen = new Set();
    const visit = (each) => {
      if (!each || seen.has(each.id)) return;
      seen.add(each.id);
      each.constants.forEach((name) => names.add(name));
      for (const edge of drawing.edges) {
        const maker = edge.to === each.id ? this.nodes.get(edge.from) : null;
        if (maker && maker.on === "load") visit(maker);
      }
    };
    visit(node);
    return [...names];
  }

  // -- sections -----------------------------------------------------------------------------------
  fill() {
    const parts = [this.tiles(), this.costs(), this.graphSection(), this.memory(), this.kernelSection(), this.where(), this.calls()];
    main.replaceChildren(...parts.filter(Boolean));
    this.graph.show(this.method.graph);
  }

  tiles() {
    const { memory, graph } = this.method;
    const segments = graph.segments.filter((each) => each.on !== "load");
    const on = (name) => segments.filter((each) => each.on === name);
    const all = [...this.nodes.values()];
    const dispatches = total(all.filter((node) => node.on !== "load"), (node) => node.dispatches.length);
    const once = total(all.filter((node) => node.on === "load"), (node) => node.dispatches.length);
    const cpu = all.filter((node) => node.on === "cpu").length;
    const runs = total(this.called, (node) => total(node.dispatches, (each) => each.runs));
    const least = this.limits ? total(this.called, (node) => total(node.dispatches, (each) => this.least(each))) : 0;
    const hosted = total(this.called, (node) => node.seconds || 0);
    const kernels = this.whole - hosted;
    const tile = (name, value, more, warn) => h("div", { class: `tile${warn ? " warn" : ""}` }, h("span", {}, name), h("b", {}, value), h("small", {}, more));
    return h("section", { class: "tiles", "aria-label": "summary" },
      this.method.timed && tile("a call", seconds(this.method.whole_call || this.whole), `kernels ${seconds(kernels)}, each alone${hosted ? `; operators on the CPU ${seconds(hosted)}` : ""}`),
      this.limits && kernels > 0 && tile("of the limit", percent(least / kernels), `${rate(this.limits.bytes_per_second, "B/s")}, ${rate(this.limits.flops_per_second, "flop/s")}`),
      tile("work", operations(total(this.ordered, (node) => this.work(node))), `${bytes(total(this.ordered, (node) => this.moved(node)))} moved`),
      tile("dispatches", dispatches, `${count(on("gpu").length, "segment")} on the GPU${once ? `, ${once} more at load` : ""}${this.method.timed && runs !== dispatches ? `; ${runs} ran in the call` : ""}`),
      tile("on the CPU", count(cpu, "node"), cpu ? "copied there and back" : "all runs on the GPU", cpu),
      tile("weights", bytes(memory.weights), count(memory.weight_count, "tensor")),
      tile("temporary", bytes(memory.planned), memory.naive > memory.planned ? `${bytes(memory.naive)} if each had its own` : memory.blocks.length ? count(memory.blocks.length, "tensor") : ""));
  }

  costs() {
    if (!this.ordered.some((node) => this.cost(node))) return null;
    const groups = new Map();
    for (const node of this.ordered.filter((each) => this.cost(each))) {
      if (!groups.has(node.label)) groups.set(node.label, { label: node.label, nodes: [] });
      groups.get(node.label).nodes.push(node);
    }
    const rows = [...groups.values()].map((row) => ({
      ...row, cost: total(row.nodes, (node) => this.cost(node)), flops: total(row.nodes, (node) => this.work(node)),
      least: this.limits ? total(row.nodes, (node) => this.within(node, (one) => total(one.dispatches, (each) => this.least(each)))) : null,
    }));
    const timed = this.unit === "time";
    const list = table([
      { name: "operators", kind: "name", of: (row) => row.label },
      { name: "nodes", number: true, wide: true, of: (row) => row.nodes.length },
      { name: timed ? "time" : "bytes", number: true, of: (row) => row.cost, show: (row) => (timed ? seconds(row.cost) : bytes(row.cost)) },
      { name: "share", number: true, of: (row) => row.cost, show: (row) => [bar(row.cost / this.whole, this.colourOf(row.nodes[0])), h("span", { class: "beside" }, percent(row.cost / this.whole))] },
      ...(timed && this.limits ? [{ name: "of limit", number: true, of: (row) => row.least / row.cost, show: (row) => (row.least ? percent(row.least / row.cost) : "") }] : []),
      { name: "work", number: true, wide: true, of: (row) => row.flops, show: (row) => (row.flops ? operations(row.flops) : "") },
    ], rows, { order: 2, most: 12, pick: (row) => this.select([...row.nodes].sort((a, b) => this.cost(b) - this.cost(a))[0].id, true) });
    const slowest = table([
      { name: timed ? "slowest nodes" : "nodes that move most", kind: "name", of: (node) => node.label, show: (node) => [node.label, h("small", { class: "path" }, node.path.join("."))] },
      { name: timed ? "time" : "bytes", number: true, of: (node) => this.cost(node), show: (node) => (timed ? seconds : bytes)(this.cost(node)) },
      ...(timed && this.limits ? [{ name: "of limit", number: true, of: (node) => (this.limitOf(node) || { share: 0 }).share, show: (node) => (this.limitOf(node) ? percent(this.limitOf(node).share) : "") }] : []),
    ], this.ordered.filter((node) => this.cost(node)).sort((a, b) => this.cost(b) - this.cost(a)).slice(0, 6), { pick: (node) => this.select(node.id, true) });
    const hosted = timed ? total(this.called, (node) => node.seconds || 0) : 0;
    const roof = this.limits ? roofline(this, this.called, this.limits) : null;
    return h("section", { id: "time" },
      h("h2", {}, timed ? "Where the time goes" : "Where the bytes go"),
      h("p", { class: "quiet" }, timed
        ? "The dispatches of a call in order, each timed alone, and the operators on the CPU. Click one to see it in the graph."
        : `The dispatches of a call in order, as wide as they move bytes. They were not timed${this.method.why_untimed && ": "}${this.method.why_untimed}. Click one to see it in the graph.`),
      strip(this, this.called),
      legend([...this.families.filter(([, cost]) => cost).map(([name, cost]) => [name, this.colours.get(name), percent(cost / this.whole)]),
        ...(hosted ? [["on the CPU", "var(--cpu)", percent(hosted / this.whole)]] : [])]),
      h("div", { class: "pair" }, h("div", {}, list, roof && h("br"), roof && slowest), !roof && slowest,
        roof && h("figure", {}, roof, h("figcaption", {}, "Dispatches below the limits measured on this device. Those on the slope are memory-bound; the size of a dot is its time. A dot above the line had its data in caches, used matrix cores, or the device was busy when its limits were measured (purevk report --remeasure)."))));
  }

  graphSection() {
    return h("section", { id: "graph" }, h("h2", {}, "Graph"), this.graph.root);
  }

  memory() {
    const { memory } = this.method;
    const kinds = [["weights", memory.weights], ["state", memory.state], ["temporary", memory.planned], ["inputs", memory.inputs], ["outputs", memory.outputs]].filter(([, size]) => size);
    const whole = total(kinds, ([, size]) => size) || 1;
    const tensors = [
      ...memory.blocks.map((each) => ({ ...each, role: "temporary" })),
      ...memory.buffers.map((each) => ({ ...each, role: each.role === "written" ? "written by the host" : "read by the host" })),
      ...memory.weight_tensors.map((each) => ({ ...each, role: "weight" })),
    ].sort((a, b) => b.bytes - a.bytes);
    return h("section", { id: "memory" }, h("h2", {}, "Memory"),
      h("div", { class: "strip thick" }, kinds.map(([name, size], at) => hover(h("i", { style: { flexGrow: size / whole, background: `var(--m${at})` } }), () => [name, bytes(size)]))),
      legend(kinds.map(([name, size], at) => [name, `var(--m${at})`, bytes(size)])),
      memory.blocks.length > 0 && h("h3", {}, "Temporary tensors over a call"),
      this.ordered.some((node) => node.graphs.length) && h("p", { class: "quiet" }, "The numbers above count sub-graphs. Temporary tensors and what the host writes and reads are listed below without those of sub-graphs."),
      memory.blocks.length > 0 && h("p", { class: "quiet" }, `Each box is a tensor: from the first to the last dispatch that needs it, at its offset. ${bytes(memory.planned)} serve ${count(memory.blocks.length, "tensor")} of ${bytes(memory.naive)}; no plan can do with less than ${bytes(memory.lower_bound)}. From left to right: the dispatches of a call.`),
      memory.blocks.length ? memoryPicture(this, memory, this.makers) : null,
      memory.blocks.length ? legend(this.families.map(([name]) => [`made by ${name}`, this.colours.get(name)])) : null,
      h("details", {}, h("summary", {}, `${count(tensors.length, "tensor")} by size`),
        table([
          { name: "tensor", kind: "name", of: (row) => row.label },
          { name: "type", wide: true, kind: "mono", of: (row) => row.type },
          { name: "role", of: (row) => row.role },
          { name: "dispatches", number: true, wide: true, of: (row) => (row.first === undefined ? null : row.first), show: (row) => (row.first === undefined ? "" : `${row.first} – ${row.last}`) },
          { name: "size", number: true, of: (row) => row.bytes, show: (row) => bytes(row.bytes) },
        ], tensors, { order: 4, most: 40 })));
  }

  kernelSection() {
    if (!this.uses.size) return null;
    return h("section", { id: "kernels" }, h("h2", {}, "Kernels"),
      h("p", { class: "quiet" }, "Click a kernel for its GLSL and what its SPIR-V consists of."), kernelTable(this));
  }

  where() {
    const all = [...this.nodes.values()];
    const cpu = all.filter((node) => node.on === "cpu" || node.on === "host");
    const reasons = new Map();
    for (const node of cpu) {
      const key = `${node.operator} ${node.why} ${node.on}`;
      if (!reasons.has(key)) reasons.set(key, { ...node, nodes: 0 });
      reasons.get(key).nodes += 1;
    }
    const steps = this.method.graph.segments.map((segment) => ({ on: segment.on, nodes: segment.nodes.length, label: segment.nodes.length === 1 ? segment.nodes[0].label : "" }));
    return h("section", { id: "where" }, h("h2", {}, "Where nodes run"),
      h("div", { class: "steps" }, steps.map((step, at) => [
        at ? h("span", { class: "arrow" }, "→") : null,
        h("span", { class: `chip on-${step.on}` }, `${WHERE[step.on]}: ${step.on === "gpu" || step.on === "load" ? count(step.nodes, "node") : step.label}`)])),
      reasons.size ? table([
        { name: "operator", kind: "name", of: (row) => row.operator },
        { name: "runs", of: (row) => WHERE[row.on] },
        { name: "why", of: (row) => row.why || (row.graphs.length ? "control flow" : "draws a seed at each run") },
        { name: "nodes", number: true, of: (row) => row.nodes },
      ], [...reasons.values()], { pick: (row) => this.select(row.id, true) }) : h("p", {}, "Every node runs on the GPU."),
      h("details", {}, h("summary", {}, `all ${count(all.length, "node")} in order`), table([
        { name: "operators", kind: "name", of: (row) => row.label },
        { name: "runs", of: (row) => WHERE[row.on] },
        { name: "module", wide: true, of: (row) => row.path.join(".") || row.source },
        { name: "result", wide: true, kind: "mono", of: (row) => row.results.map((each) => each.type).join(", ") },
        { name: this.unit, number: true, of: (row) => this.cost(row) || null, show: (row) => (this.cost(row) ? (this.unit === "time" ? seconds : bytes)(this.cost(row)) : "") },
      ], all, { most: 60, pick: (row) => this.select(row.id, true) })));
  }

  calls() {
    const { inputs, outputs, symbols, sizes, guards, checks } = this.method;
    const kinds = (list) => h("ul", { class: "args" }, list.map((each) => h("li", {}, h("b", {}, each.name), " ", h("code", {}, each.type))));
    const names = Object.entries(symbols);
    return h("section", { id: "calls" }, h("h2", {}, "Calls"),
      h("div", { class: "pair" },
        h("div", {}, h("h3", {}, "Inputs"), kinds(inputs)), h("div", {}, h("h3", {}, "Outputs"), kinds(outputs))),
      names.length ? [h("h3", {}, "Dynamic sizes"), h("ul", {}, names.map(([name, each]) =>
        h("li", {}, h("b", {}, name), each.origin && ` is ${each.origin}`, each.max === null ? `: ${each.min} or more` : `: ${each.min} to ${each.max}`,
          sizes[name] === undefined ? null : h("small", {}, ` (numbers here are for ${sizes[name]})`))))] : null,
      h("h3", {}, "Guards"),
      guards.length
        ? [h("p", { class: "quiet" }, "This lowering serves calls that keep these. For other sizes, the method is lowered again."),
          h("ul", { class: "guards" }, guards.map((each) => h("li", { title: each.text }, each.words)))]
        : h("p", {}, names.length ? "None: this lowering serves all sizes within the bounds." : "None: all sizes are fixed."),
      checks.length ? [h("h3", {}, "Checks"), h("p", { class: "quiet" }, "A call that breaks one of these raises an error."),
        h("ul", { class: "guards" }, checks.map((each) => h("li", {}, each.words, each.text && h("small", {}, ` (${each.text})`))))] : null);
  }
}

const main = h("main");
const page = new Page();
const device = data.device;
document.body.replaceChildren(
  h("header", {},
    h("div", { class: "brand" },
      s("svg", { viewBox: "0 0 32 32", width: 26, height: 26, "aria-hidden": "true" }, s("rect", { width: 32, height: 32, rx: 7, fill: "#5e35b1" }),
        s("path", { d: "M7 9 L16 25 L25 9", fill: "none", stroke: "#fff", "stroke-width": 3.6, "stroke-linejoin": "round", "stroke-linecap": "round" })),
      h("div", {}, h("h1", {}, data.model),
        h("p", {}, `${device.kind ? `${device.name} (${device.kind})` : `lowered for ${device.name}`} · purevk ${data.purevk}`))),
    data.methods.length > 1
      ? h("label", { class: "method" }, "method ", h("select", { onchange: (event) => page.show(event.target.selectedIndex) }, data.methods.map((each) => h("option", {}, each.name))))
      : h("span", { class: "method" }, "method ", h("b", {}, data.methods[0].name)),
    h("nav", {}, [["time", "costs"], ["graph", "graph"], ["memory", "memory"], ["kernels", "kernels"], ["where", "where"], ["calls", "calls"]].map(([id, name]) =>
      h("a", { href: `#${id}` }, name)))),
  main, tip);
page.show(0);
