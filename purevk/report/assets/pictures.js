// Pictures of a call: dispatches in time, tensors in memory, kernels below the roofline.

// Each dispatch a part of a bar, as wide as it takes time (or moves bytes), and each node without one.
// Those of a loop have a part for all runs together.
function strip(page, nodes) {
  const parts = nodes.filter((node) => page.cost(node) > 0 && !node.graphs.length).flatMap((node) => (node.dispatches.length
    ? node.dispatches.map((each) => ({ node, cost: page.costOf(each), colour: page.colours.get(page.familyOf(each)) }))
    : [{ node, cost: page.cost(node), colour: page.colourOf(node) }]));
  return h("div", { class: "strip", role: "img", "aria-label": "dispatches of a call in order" }, parts.filter(({ cost }) => cost).map(({ node, cost, colour }) =>
    hover(h("i", {
      style: { flexGrow: cost / page.whole, background: colour },
      onclick: () => page.select(node.id, true),
    }), () => page.lines(node))));
}

function legend(items) {
  return h("div", { class: "legend" }, items.map(([name, colour, more]) =>
    h("span", {}, h("i", { style: { background: colour } }), name, more && h("small", {}, ` ${more}`))));
}

// Round numbers up to `top`, at most about `most` of them: powers of two for bytes, else 1, 2, 5, 10, ...
function ticks(top, most, binary = true) {
  const rough = Math.max(top / most, 1);
  const power = binary ? 2 ** Math.ceil(Math.log2(rough)) : 10 ** Math.floor(Math.log10(rough));
  const step = binary ? power : [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = 0; at <= top; at += step) found.push(at);
  return found;
}

// Temporary memory: x is the dispatch, y the offset; each tensor a box.
function memoryPicture(page, memory, makers) {
  const holder = h("div", { class: "memory" });
  const drawn = { width: 0 };
  function draw() {
    const width = Math.max(holder.clientWidth, 240);
    if (width === drawn.width) return;
    drawn.width = width;
    const left = 62;
    const [top, bottom] = [8, 26];
    const height = Math.min(Math.max(width * 0.36, 240), 420);
    const whole = total(memory.arenas, (each) => each);
    const x = (step) => left + ((width - left - 6) * step) / memory.steps;
    const y = (offset) => top + (height - top - bottom) * (1 - offset / whole);
    const starts = memory.arenas.map((_, at) => total(memory.arenas.slice(0, at), (each) => each));
    const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "temporary memory over a call" });
    for (const at of ticks(whole, 5)) {
      picture.append(s("line", { class: "grid", x1: left, x2: width - 6, y1: y(at), y2: y(at) }),
        s("text", { class: "tick right", x: left - 8, y: y(at) + 4 }, bytes(at)));
    }
    for (const step of ticks(memory.steps, width / 70, false)) {
      picture.append(s("text", { class: "tick middle", x: x(step), y: height - 8 }, step));
    }
    starts.slice(1).forEach((start) => picture.append(s("line", { class: "arena", x1: left, x2: width - 6, y1: y(start), y2: y(start) })));
    for (const block of memory.blocks) {
      const base = starts[block.arena] + block.offset;
      const node = makers.get(block.first);
      const [x1, x2, y1, y2] = [x(block.first), x(block.last + 1), y(base + block.bytes), y(base)];
      const box = s("g", { class: "block", tabindex: 0, onclick: () => node && page.select(node.id, true),
        onkeydown: (event) => { if (event.key === "Enter" && node) page.select(node.id, true); } },
        s("rect", { x: x1 + 0.5, y: y1 + 0.5, width: Math.max(x2 - x1 - 1, 1), height: Math.max(y2 - y1 - 1, 1), rx: 2, fill: node ? page.colourOf(node) : "gray" }));
      const room = Math.floor((x2 - x1 - 10) / 7);
      const label = shortened(block.label, Math.max(room, 1));
      if (room >= Math.min(block.label.length, 8) && y2 - y1 > 15) box.append(s("text", { x: x1 + 6, y: Math.min((y1 + y2) / 2 + 4, y2 - 4) }, label));
      picture.append(hover(box, () => [block.label, block.type, `${bytes(block.bytes)} at offset ${bytes(block.offset)}${memory.arenas.length > 1 ? ` of arena ${block.arena}` : ""}`,
        `dispatches ${block.first} to ${block.last}`, node ? `made by ${node.label}` : null]));
    }
    holder.replaceChildren(picture);
  }
  new ResizeObserver(draw).observe(holder);
  return holder;
}

// Dispatches below the limits of the device, both axes logarithmic.
function roofline(page, nodes, limits) {
  const points = nodes.flatMap((node) => node.dispatches.filter((each) => each.seconds && each.flops && each.bytes)
    .map((each) => ({ node, each, x: each.flops / each.bytes, y: each.flops / each.seconds })));
  if (!points.length) return null;
  const holder = h("div", { class: "roofline" });
  const drawn = { width: 0 };
  const ridge = limits.flops_per_second / limits.bytes_per_second;
  const low = Math.min(...points.map((point) => point.x), ridge) / 1.6;
  const high = Math.max(...points.map((point) => point.x), ridge) * 2.2;
  const least = Math.min(...points.map((point) => point.y), limits.bytes_per_second * low) / 1.6;
  const most = Math.max(...points.map((point) => point.y), limits.flops_per_second) * 3;
  function draw() {
    const width = Math.max(holder.clientWidth, 240);
    if (width === drawn.width) return;
    drawn.width = width;
    const [left, top, bottom, right] = [58, 10, 40, 8];
    const height = Math.min(Math.max(width * 0.62, 230), 330);
    const x = (number) => left + ((width - left - right) * Math.log(number / low)) / Math.log(high / low);
    const y = (number) => top + (height - top - bottom) * (1 - Math.log(number / least) / Math.log(most / least));
    const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "dispatches below the limits of the device" });
    for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power += 1) {
      picture.append(s("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: top, y2: height - bottom }),
        s("text", { class: "tick middle", x: x(10 ** power), y: height - bottom + 16 }, Number((10 ** power).toPrecision(1))));
    }
    for (let power = Math.ceil(Math.log10(least)); 10 ** power <= most; power += 1) {
      picture.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }),
        s("text", { class: "tick right", x: left - 7, y: y(10 ** power) + 4 }, scaled(10 ** power, 1000, ["", "k", "M", "G", "T"])));
    }
    picture.append(
      s("text", { class: "tick middle", x: (left + width) / 2, y: height - 6 }, "operations per byte"),
      s("text", { class: "tick halo", x: left + 6, y: top + 12 }, "flop/s"),
      s("path", { class: "roof", d: `M${x(low)} ${y(limits.bytes_per_second * low)} L${x(ridge)} ${y(limits.flops_per_second)} L${x(high)} ${y(limits.flops_per_second)}` }),
    );
    for (const point of [...points].sort((a, b) => b.each.seconds - a.each.seconds)) {
      const size = 3 + 11 * Math.sqrt(point.each.seconds / page.largest);
      picture.append(hover(s("circle", {
        class: "point", cx: x(point.x), cy: y(point.y), r: Math.min(size, 14), fill: page.colours.get(family(page.kernels[point.each.kernel].template)),
        onclick: () => page.select(point.node.id, true),
      }), () => [...page.lines(point.node), `${digits(point.x)} operations per byte, ${rate(point.y, "flop/s")}`]));
    }
    const lowest = y(limits.bytes_per_second * low);
    const slope = (Math.atan2(y(limits.flops_per_second) - lowest, x(ridge) - x(low)) * 180) / Math.PI;
    picture.append(
      s("text", { class: "tick right halo", x: width - right - 4, y: Math.max(y(limits.flops_per_second) - 20, top + 12) }, rate(limits.flops_per_second, "flop/s")),
      s("text", { class: "tick halo", transform: `translate(${x(low) + 12} ${lowest - 14}) rotate(${slope})` }, rate(limits.bytes_per_second, "B/s")));
    holder.replaceChildren(picture);
  }
  new ResizeObserver(draw).observe(holder);
  return holder;
}
