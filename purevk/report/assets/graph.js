// The graph: modules that fold, boxes that are nodes.
const NODE_W = 196;
const NODE_H = 50;
const PAD = 16;
const TITLE_H = 30;
const FIRST_BOXES = 34; // modules are unfolded from the outside on up to so many boxes
const MAIN_BOXES = 400; // the same for a module that has most of the nodes
const FEW = 3; // nodes of a module that is not worth a box of its own

class GraphView {
  constructor(page) {
    this.page = page;
    this.open = new Set();
    this.loads = false;
    this.trail = [];
    this.canvas = s("svg", { class: "canvas", role: "img", "aria-label": "graph of the method" });
    this.content = s("g");
    this.canvas.append(
      s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" },
        s("path", { d: "M0 0.5 L8 4 L0 7.5 z" }))),
      this.content);
    this.crumbs = h("div", { class: "crumbs" });
    this.outline = h("div", { class: "outline", role: "tree", "aria-label": "modules and nodes in order" });
    this.panel = h("aside", { class: "panel", "aria-live": "polite" });
    this.loadBox = h("input", { type: "checkbox", onchange: (event) => { this.loads = event.target.checked; this.rebuild(); this.draw(); this.fit(); } });
    this.field = h("input", {
      type: "search", placeholder: "search: operator, module, tensor, shape", "aria-label": "search in the graph",
      oninput: () => this.search(),
      onkeydown: (event) => {
        if (event.key === "Enter" && this.hits && this.hits.length) this.page.select(this.hits[0]);
        if (event.key === "Escape") { this.field.value = ""; this.search(); }
      },
    });
    this.found = h("div", { class: "found", hidden: true });
    const button = (text, title, onclick) => h("button", { type: "button", title, "aria-label": title, onclick }, text);
    this.loadSwitch = h("label", { class: "switch", title: "nodes that run once, from constants alone" }, this.loadBox, " load-time nodes");
    this.frame = h("div", { class: "frame" }, this.canvas,
      h("div", { class: "zoom" },
        button("+", "zoom in", () => this.zoom(1.3)), button("−", "zoom out", () => this.zoom(1 / 1.3)),
        button("fit", "show all", () => this.fit(true)),
        h("button", { type: "button", title: "fill the window, or not", "aria-label": "fill the window, or not", onclick: () => this.fill() },
          s("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, s("path", { d: "M2 6V2h4M10 2h4v4M14 10v4h-4M6 14H2v-4" })))));
    this.split = h("div", { class: "split" }, this.outline, this.frame, this.panel);
    this.root = h("div", { class: "graph" },
      h("div", { class: "tools" }, h("div", { class: "search" }, this.field, this.found),
        button("fold all", "fold all modules", () => { this.open.clear(); this.draw(); this.fit(); }),
        button("unfold all", "unfold all modules", () => { this.unfold(Infinity); this.draw(); this.fit(); }),
        this.loadSwitch),
      this.crumbs, this.split);
    this.listen();
  }

  // -- what is shown ------------------------------------------------------------------------------
  show(drawing) {
    this.trail = [drawing];
    this.start();
  }

  enter(drawing) {
    this.trail.push(drawing);
    this.start();
  }

  start() {
    const drawing = this.trail[this.trail.length - 1];
    this.drawing = drawing;
    this.loadSwitch.hidden = !drawing.segments.some((segment) => segment.on === "load");
    this.crumbs.hidden = this.trail.length < 2;
    this.crumbs.replaceChildren(...this.trail.map((each, at) => h("button", {
      type: "button", onclick: () => { this.trail.length = at + 1; this.start(); },
    }, each.name)));
    this.open.clear();
    this.rebuild();
    this.unfold(FIRST_BOXES);
    this.draw();
    // A small graph needs no tall frame; the panel beside it needs some height.
    this.split.style.setProperty("--tall", `${Math.min(Math.max(this.size.h + 60, 440), 680)}px`);
    this.fit();
    this.details(null);
  }

  // The leaves: nodes, inputs, states and outputs; and the tree of modules over them.
  rebuild() {
    const drawing = this.drawing;
    this.leaves = new Map();
    const leaf = (id, made) => this.leaves.set(id, { id, w: NODE_W, h: NODE_H, order: this.leaves.size, ...made });
    const end = (kind) => (each) => leaf(each.id, { end: kind, title: each.name, below: each.type, path: [], h: 40 });
    drawing.inputs.forEach(end("input"));
    drawing.states.forEach(end("state"));
    for (const segment of drawing.segments) {
      if (segment.on === "load" && !this.loads) continue;
      for (const node of segment.nodes) {
        leaf(node.id, { node, title: node.label, below: node.results.map((each) => each.type).join(", "), path: node.path });
      }
    }
    drawing.outputs.forEach(end("output"));
    this.edges = drawing.edges.filter((edge) => this.leaves.has(edge.from) && this.leaves.has(edge.to));
    this.putBeforeReaders();
    this.tree = { key: "", name: "", groups: new Map(), leaves: [], above: null };
    for (const each of this.leaves.values()) {
      let group = this.tree;
      for (const part of each.path) {
        if (!group.groups.has(part)) {
          group.groups.set(part, { key: `${group.key}/${part}`, name: part, groups: new Map(), leaves: [], above: group });
        }
        group = group.groups.get(part);
      }
      group.leaves.push(each);
    }
    this.simplify(this.tree);
    this.outline.replaceChildren(...this.rows(this.tree));
  }

  // What runs at load comes right before the first node that reads it, not before all others.
  putBeforeReaders() {
    const first = new Map();
    for (const edge of this.edges) {
      if (!first.has(edge.from)) first.set(edge.from, []);
      first.get(edge.from).push(edge.to);
    }
    for (const leaf of [...this.leaves.values()].reverse()) {
      if (!leaf.node || leaf.node.on !== "load" || !first.has(leaf.id)) continue;
      leaf.order = Math.min(...first.get(leaf.id).map((id) => this.leaves.get(id).order)) - 1e-5;
    }
  }

  // A module with one child is drawn as this child; one with few nodes as these nodes.
  simplify(group) {
    for (const [name, inner] of [...group.groups]) {
      this.simplify(inner);
      const only = inner.groups.size === 1 && !inner.leaves.length ? [...inner.groups.values()][0] : null;
      if (only) {
        only.name = `${inner.name}.${only.name}`;
        only.above = group;
        group.groups.set(name, only);
      } else if (!inner.groups.size && inner.leaves.length < FEW) {
        for (const each of inner.leaves) each.module = each.module ? `${inner.name}.${each.module}` : inner.name;
        group.leaves.push(...inner.leaves);
        group.groups.delete(name);
      }
    }
    group.all = [...group.leaves, ...[...group.groups.values()].flatMap((inner) => inner.all)];
    group.order = Math.min(...group.all.map((each) => each.order));
    for (const each of group.leaves) each.above = group;
  }

  // The outline: modules and nodes in order. What is inside of a module is made when it is unfolded.
  rows(group) {
    return this.items(group).filter((item) => !item.end).map((item) => {
      const cost = item.groups ? this.costOf(item) : this.page.cost(item.node);
      const share = h("small", {}, cost ? percent(cost / this.page.whole) : "");
      if (!item.groups) {
        return h("button", { type: "button", class: "leaf", role: "treeitem", "data-outline": item.id, onclick: () => this.page.select(item.id) },
          h("i", { class: "dot", style: { background: this.page.colourOf(item.node) } }), h("span", {}, item.module && h("b", {}, `${item.module} `), item.title), share);
      }
      const inside = h("div", { class: "inside", role: "group" });
      const main = 2 * item.all.length > this.leaves.size;
      return h("details", { open: main, ontoggle: (event) => {
        if (event.target.open && !inside.childElementCount) inside.append(...this.rows(item));
      } },
        h("summary", { role: "treeitem", onclick: () => this.reveal(item) }, h("span", {}, item.name), share), inside);
    });
  }

  costOf(group) {
    return total(group.all, (leaf) => (leaf.node ? this.page.cost(leaf.node) : 0));
  }

  // Shows a module in the middle of the drawing.
  reveal(item) {
    for (let group = item.above; group && group !== this.tree; group = group.above) this.open.add(group.key);
    this.draw();
    this.centreOn(item);
  }

  unfold(most) {
    let boxes = this.tree.leaves.length + this.tree.groups.size;
    let level = [...this.tree.groups.values()];
    while (level.length) {
      const next = [];
      for (const group of level) {
        const inside = group.leaves.length + group.groups.size;
        const main = 2 * group.all.length > this.leaves.size;
        if (boxes + inside - 1 > (main ? Math.max(most, MAIN_BOXES) : most)) continue;
        boxes += inside - 1;
        this.open.add(group.key);
        next.push(...group.groups.values());
      }
      level = next;
    }
  }

  // -- drawing ------------------------------------------------------------------------------------
  draw() {
    this.boxes = new Map(); // elements of leaves
    this.lines = [];
    const size = this.arranged(this.tree);
    const [frames, edges, boxes] = [s("g"), s("g"), s("g")];
    this.put(this.tree, 0, 0, frames, boxes);
    this.connect(edges);
    this.content.replaceChildren(frames, edges, boxes);
    this.size = size;
    this.mark();
  }

  items(group) {
    const groups = [...group.groups.values()];
    return [...group.leaves, ...groups].sort((a, b) => a.order - b.order);
  }

  // Lays out what is inside of a module, from the inside to the outside. Returns the size.
  arranged(group) {
    const items = this.items(group);
    for (const item of items) {
      if (!item.groups) continue;
      if (this.open.has(item.key)) {
        const inner = this.arranged(item);
        item.w = Math.max(inner.w + 2 * PAD, 8 * item.name.length + 70);
        item.h = inner.h + TITLE_H + 2 * PAD - 4;
        item.indent = (item.w - inner.w) / 2;
      } else {
        item.w = NODE_W;
        item.h = NODE_H;
      }
    }
    // Edges that come from outside enter at the top, one port for each tensor's maker; others leave below.
    group.entries = new Map();
    group.exits = new Map();
    group.routes = new Map();
    const port = (ports, kind, id) => {
      if (!ports.has(id)) ports.set(id, { port: kind, w: LANE, h: 0 });
      return ports.get(id);
    };
    const pairs = [];
    const join = (from, to) => {
      if (!group.routes.has(from)) group.routes.set(from, new Map());
      if (group.routes.get(from).has(to)) return;
      group.routes.get(from).set(to, null);
      pairs.push([from, to]);
    };
    for (const edge of this.edges) {
      const from = this.child(group, this.leaves.get(edge.from));
      const to = this.child(group, this.leaves.get(edge.to));
      if (from && to && from !== to) join(from, to);
      else if (to && !from) join(port(group.entries, "entry", edge.from), to);
      else if (from && !to) join(from, port(group.exits, "exit", edge.from));
    }
    const boxes = [...group.entries.values(), ...items, ...group.exits.values()];
    const numbers = new Map(boxes.map((item, at) => [item, at]));
    const edges = pairs.map(([from, to]) => {
      const edge = [numbers.get(from), numbers.get(to)];
      group.routes.get(from).set(to, edge);
      return edge;
    });
    return layered(boxes, edges);
  }

  // The child of a module that a leaf is in, or null.
  child(group, leaf) {
    let item = leaf;
    while (item.above && item.above !== group) item = item.above;
    return item.above ? item : null;
  }

  // What stands for a leaf: itself, or the outermost folded module around it.
  visible(leaf) {
    let shown = leaf;
    for (let group = leaf.above; group && group !== this.tree; group = group.above) {
      if (!this.open.has(group.key)) shown = group;
    }
    return shown;
  }

  put(group, x, y, frames, boxes) {
    group.inner = { x, y };
    for (const port of [...group.entries.values(), ...group.exits.values()]) {
      port.point = { x: x + port.x + port.w / 2, y: y + port.y };
    }
    for (const item of this.items(group)) {
      item.left = x + item.x;
      item.top = y + item.y;
      if (!item.groups) boxes.append(this.leafBox(item));
      else if (!this.open.has(item.key)) boxes.append(this.foldedBox(item));
      else {
        frames.append(this.openFrame(item));
        this.put(item, item.left + item.indent, item.top + TITLE_H + PAD - 4, frames, boxes);
      }
    }
  }

  leafBox(item) {
    const node = item.node;
    const kind = node ? `node on-${node.on}` : `end ${item.end}`;
    const box = s("g", {
      class: kind, transform: `translate(${item.left} ${item.top})`, tabindex: 0, role: "button",
      "data-id": item.id, "aria-label": `${item.title} ${item.below}`,
      onclick: () => this.page.select(item.id),
      onkeydown: (event) => { if (event.key === "Enter") this.page.select(item.id); },
    },
      s("rect", { width: item.w, height: item.h, rx: node ? 7 : item.h / 2 }),
      node && s("path", { class: "stripe", d: `M7 0.5 H5 V${item.h - 0.5} H7 a6.5 6.5 0 0 1 -6.5 -6.5 V7 a6.5 6.5 0 0 1 6.5 -6.5 z`, fill: this.page.colourOf(node) }),
      s("text", { class: "title", x: node ? 15 : item.w / 2, y: node ? 21 : 17 }, shortened(item.title, 21)),
      s("text", { class: "below", x: node ? 15 : item.w / 2, y: node ? 38 : 31 }, shortened(item.below, 29)));
    const cost = node ? this.page.cost(node) : 0;
    if (cost) {
      const share = Math.min(cost / this.page.largest, 1);
      box.append(s("rect", { class: "heat", x: 7, y: item.h - 3.5, width: Math.max((item.w - 14) * share, 1), height: 3, rx: 1.5 }));
    }
    this.boxes.set(item.id, box);
    return hover(box, () => (node ? this.page.lines(node) : [`${item.end}: ${item.title}`, item.below]));
  }

  foldedBox(item) {
    const nodes = item.all.filter((leaf) => leaf.node);
    const cost = this.costOf(item);
    const cpu = nodes.some((leaf) => leaf.node.on === "cpu");
    const box = s("g", {
      class: `module${cpu ? " on-cpu" : ""}`, transform: `translate(${item.left} ${item.top})`, tabindex: 0, role: "button",
      "aria-label": `module ${item.name}, folded`, "data-module": item.key,
      onclick: () => this.toggle(item),
      onkeydown: (event) => { if (event.key === "Enter") this.toggle(item); },
    },
      s("rect", { class: "back", x: 4, y: 4, width: item.w, height: item.h, rx: 7 }),
      s("rect", { width: item.w, height: item.h, rx: 7 }),
      s("text", { class: "fold", x: 12, y: 31 }, "+"),
      s("text", { class: "title", x: 30, y: 21 }, shortened(item.name, 24)),
      s("text", { class: "below", x: 30, y: 38 },
        `${count(nodes.length, "node")}${cost ? ` · ${percent(cost / this.page.whole)} of ${this.page.unit}` : ""}`));
    return box;
  }

  openFrame(item) {
    return s("g", { class: "open", transform: `translate(${item.left} ${item.top})` },
      s("rect", { width: item.w, height: item.h, rx: 9 }),
      s("g", {
        class: "caption", tabindex: 0, role: "button", "aria-label": `module ${item.name}, unfolded`, "data-module": item.key,
        onclick: () => this.toggle(item),
        onkeydown: (event) => { if (event.key === "Enter") this.toggle(item); },
      },
        s("rect", { class: "hit", width: item.w, height: TITLE_H }),
        s("text", { class: "fold", x: 12, y: 20 }, "−"), s("text", { x: 28, y: 20 }, item.name)));
  }

  connect(edges) {
    const drawn = new Map();
    for (const edge of this.edges) {
      const [from, to] = [this.leaves.get(edge.from), this.leaves.get(edge.to)];
      const ends = [this.visible(from), this.visible(to)];
      if (ends[0] === ends[1]) continue;
      const key = ends.map((end) => JSON.stringify(end.id || end.key)).join(" ");
      if (!drawn.has(key)) drawn.set(key, { path: curve(ends[0], this.route(edge, from, to, ends), ends[1]), edges: [] });
      drawn.get(key).edges.push(edge);
    }
    for (const each of drawn.values()) {
      const line = s("path", { class: "edge", d: each.path, "marker-end": "url(#arrow)" });
      hover(line, () => [...new Set(each.edges.map((edge) => edge.type))].slice(0, 4));
      edges.append(line);
      this.lines.push({ line, edges: each.edges });
    }
  }

  // The points of an edge between its ends: out of the modules around the one, and into those around the other.
  route(edge, from, to, ends) {
    const around = (end) => {
      const found = [];
      for (let group = end.above; group; group = group.above) found.push(group);
      return found;
    };
    const inTo = new Set(around(ends[1]));
    const points = [];
    const leave = around(ends[0]);
    const level = leave.findIndex((group) => inTo.has(group));
    const part = (group, one, other) => this.shifted(group, group.routes.get(one).get(other).via);
    for (const group of leave.slice(0, level)) {
      const port = group.exits.get(edge.from);
      points.push(...part(group, this.child(group, from), port), port.point);
    }
    const common = leave[level];
    points.push(...part(common, this.child(common, from), this.child(common, to)));
    const enter = around(ends[1]);
    for (const group of enter.slice(0, enter.indexOf(common)).reverse()) {
      const port = group.entries.get(edge.from);
      points.push(port.point, ...part(group, port, this.child(group, to)));
    }
    return points;
  }

  shifted(group, points) {
    return points.map((point) => ({ x: point.x + group.inner.x, y: point.y + group.inner.y }));
  }

  toggle(group) {
    if (this.moved) return;
    tip.hidden = true;
    const before = { x: group.left, y: group.top };
    if (!this.open.delete(group.key)) this.open.add(group.key);
    this.draw();
    // What was clicked stays where it was.
    this.view.x += group.left - before.x;
    this.view.y += group.top - before.y;
    this.look();
  }

  // -- selection ----------------------------------------------------------------------------------
  select(id, follow) {
    const leaf = this.leaves.get(id);
    if (!leaf && !this.loads && this.page.node(id) && this.page.node(id).on === "load") {
      this.loads = this.loadBox.checked = true;
      this.rebuild();
      return this.select(id, follow);
    }
    if (!leaf) return undefined;
    let hidden = !this.boxes.has(id);
    for (let group = leaf.above; group && group !== this.tree; group = group.above) {
      if (!this.open.has(group.key)) hidden = true;
      this.open.add(group.key);
    }
    if (hidden) this.draw();
    this.selected = id;
    this.mark();
    const box = this.box();
    const inside = leaf.left > this.view.x && leaf.left + leaf.w < this.view.x + box.width / this.view.scale
      && leaf.top > this.view.y && leaf.top + leaf.h < this.view.y + box.height / this.view.scale;
    if (hidden || follow || !inside) this.centreOn(leaf);
    return undefined;
  }

  mark() {
    for (const [id, box] of this.boxes) box.classList.toggle("selected", id === this.selected);
    for (const { line, edges } of this.lines) {
      line.classList.toggle("selected", edges.some((edge) => edge.from === this.selected || edge.to === this.selected));
    }
  }

  details(content) {
    this.panel.classList.toggle("empty", !content);
    this.panel.replaceChildren(...(content || [h("p", { class: "quiet" },
      "Click a node for its operator, kernels, time and weights; a module to unfold it. Drag to move, Ctrl and the wheel or two fingers to zoom.")]));
  }

  search() {
    const words = this.field.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    this.hits = [];
    const rows = [];
    if (words.length) {
      for (const [id, text] of this.page.texts()) {
        if (words.every((word) => text.includes(word))) this.hits.push(id);
      }
      const atLoad = (id) => Number((this.page.node(id) || {}).on === "load");
      this.hits.sort((one, other) => atLoad(one) - atLoad(other));
      rows.push(h("div", { class: "quiet" }, this.hits.length ? `${count(this.hits.length, "hit")}${this.hits.length > 40 ? ", the first 40" : ""}` : "nothing found"));
      for (const id of this.hits.slice(0, 40)) {
        const [title, below] = this.page.named(id);
        rows.push(h("button", { type: "button", onclick: () => { this.page.select(id); this.found.hidden = true; } },
          h("b", {}, title), h("span", {}, below)));
      }
    }
    const hits = new Set(this.hits);
    for (const [id, box] of this.boxes) box.classList.toggle("hit", hits.has(id));
    this.found.replaceChildren(...rows);
    this.found.hidden = !rows.length;
  }

  // -- what part is seen --------------------------------------------------------------------------
  box() {
    return this.frame.getBoundingClientRect();
  }

  look() {
    const { x, y, scale } = this.view;
    this.content.setAttribute("transform", `scale(${scale}) translate(${-x} ${-y})`);
  }

  // The whole width from the top, at a size that can be read; `all`: everything.
  fit(all = false) {
    const box = this.box();
    const wide = box.width / (this.size.w + 40);
    const scale = Math.min(all ? Math.min(wide, box.height / (this.size.h + 40)) : Math.max(wide, 0.62), 1);
    this.view = { scale, x: this.size.w / 2 - box.width / scale / 2, y: -20 / scale };
    const shown = this.size.h * scale + 40;
    if (shown < box.height) this.view.y = this.size.h / 2 - box.height / scale / 2;
    this.look();
  }

  // Has the graph fill the window, or puts it back. What is in the middle stays there.
  fill(full = !this.split.classList.contains("full")) {
    const before = this.box();
    this.split.classList.toggle("full", full);
    const after = this.box();
    this.view.x -= (after.width - before.width) / 2 / this.view.scale;
    this.view.y -= (after.height - before.height) / 2 / this.view.scale;
    this.look();
  }

  zoom(factor, x, y) {
    const box = this.box();
    const at = { x: x === undefined ? box.width / 2 : x - box.left, y: y === undefined ? box.height / 2 : y - box.top };
    const scale = Math.min(Math.max(this.view.scale * factor, 0.04), 3);
    this.view.x += at.x / this.view.scale - at.x / scale;
    this.view.y += at.y / this.view.scale - at.y / scale;
    this.view.scale = scale;
    this.look();
  }

  centreOn(leaf) {
    const box = this.box();
    this.view.scale = Math.max(this.view.scale, 0.7);
    this.view.x = leaf.left + leaf.w / 2 - box.width / this.view.scale / 2;
    // What is too high is shown from its top on.
    this.view.y = leaf.top - Math.max((box.height / this.view.scale - leaf.h) / 2, 12 / this.view.scale);
    this.look();
  }

  listen() {
    const fingers = new Map();
    this.frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * 0.004), event.clientX, event.clientY);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      this.moved = false;
    });
    addEventListener("pointermove", (event) => {
      const last = fingers.get(event.pointerId);
      if (!last) return;
      const [dx, dy] = [event.clientX - last.x, event.clientY - last.y];
      if (!this.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
      this.moved = true;
      tip.hidden = true;
      if (fingers.size === 2) {
        const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
        const far = (point) => Math.hypot(point.x - other.x, point.y - other.y);
        const now = { x: event.clientX, y: event.clientY };
        this.zoom(far(now) / Math.max(far(last), 1), (now.x + other.x) / 2, (now.y + other.y) / 2);
      } else {
        this.view.x -= dx / this.view.scale;
        this.view.y -= dy / this.view.scale;
        this.look();
      }
      fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    });
    for (const name of ["pointerup", "pointercancel"]) {
      addEventListener(name, (event) => {
        if (fingers.delete(event.pointerId)) setTimeout(() => { this.moved = false; });
      });
    }
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.split.classList.contains("full")) this.fill(false);
    });
    document.addEventListener("click", (event) => {
      if (!event.target.closest || !event.target.closest(".search")) this.found.hidden = true;
    });
    this.canvas.addEventListener("click", (event) => { if (this.moved) event.stopPropagation(); }, true);
  }
}

// An edge from the bottom of a box, through points, to the top of another.
function curve(from, via, to) {
  const points = [{ x: from.left + from.w / 2, y: from.top + from.h }, ...via, { x: to.left + to.w / 2, y: to.top }];
  let path = `M${points[0].x} ${points[0].y}`;
  for (let at = 1; at < points.length; at += 1) {
    const [a, b] = [points[at - 1], points[at]];
    if (Math.abs(a.x - b.x) < 0.5) path += ` L${b.x} ${b.y}`;
    else {
      const bend = Math.abs(b.y - a.y) / 2;
      const sign = b.y >= a.y ? 1 : -1;
      path += ` C${a.x} ${a.y + sign * bend} ${b.x} ${b.y - sign * bend} ${b.x} ${b.y}`;
    }
  }
  return path;
}
