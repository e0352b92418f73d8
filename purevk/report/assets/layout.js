// A layered drawing of boxes, from top to bottom.
const GAP_X = 26;
const GAP_Y = 34;
const GAP_PORT = 14;
const LANE = 14; // width that an edge takes between boxes
const FAR = 60; // layers: an edge over more of them gets no lanes

// boxes: {w, h, port}, in an order in which they can run. edges: [from, to], numbers of boxes.
// A port is a point at the top ("entry") or at the bottom ("exit").
// Returns the size of the drawing, and gives each box x and y, the corner, and each edge `via`: points between its ends.
function layered(boxes, edges) {
  const count = boxes.length;
  const forward = edges.map((edge) => ({ edge, from: Math.min(edge[0], edge[1]), to: Math.max(edge[0], edge[1]) }));
  const after = boxes.map(() => []);
  const before = boxes.map(() => []);
  for (const each of forward) {
    after[each.from].push(each.to);
    before[each.to].push(each.from);
  }
  const rank = new Array(count).fill(0);
  for (let at = 0; at < count; at += 1) for (const next of after[at]) rank[next] = Math.max(rank[next], rank[at] + 1);
  for (let at = count - 1; at >= 0; at -= 1) {
    // What nothing precedes stands right above what reads it.
    if (!boxes[at].port && !before[at].length && after[at].length) rank[at] = Math.min(...after[at].map((next) => rank[next])) - 1;
  }
  const bottom = Math.max(...rank) + 1;
  boxes.forEach((box, at) => { if (box.port === "exit") rank[at] = bottom; });
  const layers = [];
  const items = boxes.map((box, at) => ({ box, w: box.w, up: [], down: [], rank: rank[at] }));
  const add = (item) => {
    (layers[item.rank] = layers[item.rank] || []).push(item);
    item.at = layers[item.rank].length - 1;
  };
  items.forEach(add);
  const join = (upper, lower) => {
    upper.down.push(lower);
    lower.up.push(upper);
  };
  for (const each of forward) {
    each.lanes = [];
    const span = rank[each.to] - rank[each.from];
    if (span > FAR) continue;
    let last = items[each.from];
    for (let layer = rank[each.from] + 1; layer < rank[each.to]; layer += 1) {
      const lane = { w: LANE, up: [], down: [], rank: layer };
      add(lane);
      join(last, lane);
      each.lanes.push(lane);
      last = lane;
    }
    if (span > 0) join(last, items[each.to]);
  }
  const filled = layers.filter(Boolean);
  arrange(filled);
  centre(filled);
  let y = 0;
  for (const layer of filled) {
    const height = Math.max(...layer.map((item) => (item.box ? item.box.h : 0)));
    for (const item of layer) {
      item.y = y;
      item.h = height;
      if (item.box) {
        item.box.x = item.x;
        item.box.y = y + (height - item.box.h) / 2;
      }
    }
    y += height + (height ? GAP_Y : GAP_PORT);
  }
  for (const each of forward) {
    each.edge.via = each.lanes.flatMap((lane) => [
      { x: lane.x + LANE / 2, y: lane.y },
      { x: lane.x + LANE / 2, y: lane.y + lane.h },
    ]);
    if (each.from !== each.edge[0]) each.edge.via.reverse();
  }
  const left = Math.min(...filled.flat().map((item) => item.x));
  const right = Math.max(...filled.flat().map((item) => item.x + item.w));
  for (const box of boxes) box.x -= left;
  for (const each of forward) for (const point of each.edge.via) point.x -= left;
  return { w: right - left, h: y - (filled.length && filled[filled.length - 1].some((item) => item.h) ? GAP_Y : GAP_PORT) };
}

// The order within layers: each item near the mean of its neighbours.
function arrange(layers) {
  for (let round = 0; round < 8; round += 1) {
    const down = round % 2 === 0;
    const order = down ? layers : [...layers].reverse();
    for (const layer of order) {
      for (const item of layer) {
        const near = down ? item.up : item.down;
        item.wish = near.length ? total(near, (each) => each.at) / near.length : item.at;
      }
      layer.sort((a, b) => a.wish - b.wish || a.at - b.at);
      layer.forEach((item, at) => { item.at = at; });
    }
  }
}

// Positions within layers: near the middle of the neighbours, without overlaps. Boxes follow boxes, so that chains
// are straight; lanes go around them.
function centre(layers) {
  const isSolid = (item) => item.box && !item.box.port;
  for (const layer of layers) {
    const solid = layer.filter(isSolid);
    let x = 0;
    for (const item of layer) {
      item.x = x;
      x += item.w + GAP_X;
    }
    const [first, last] = solid.length ? [solid[0], solid[solid.length - 1]] : [layer[0], layer[layer.length - 1]];
    const half = (first.x + last.x + last.w) / 2;
    for (const item of layer) item.x -= half;
  }
  const middle = (item) => item.x + item.w / 2;
  for (let round = 0; round < 24; round += 1) {
    const order = round % 2 ? [...layers].reverse() : layers;
    for (const layer of order) {
      const wishes = layer.map((item) => {
        const near = [...item.up, ...item.down];
        if (!near.length) return item.x;
        const others = isSolid(item) ? 0.001 : item.box ? 0.1 : 4;
        const weight = (each) => (isSolid(each) ? 1 : others);
        return total(near, (each) => weight(each) * middle(each)) / total(near, weight) - item.w / 2;
      });
      spread(layer, wishes, layer.map((item) => (isSolid(item) ? 1000 : 1)));
    }
  }
}

// Gives the items of a layer the positions without overlaps that are nearest to what they wish, in the least squares.
// Items that would overlap form a block, which moves as one.
function spread(layer, wishes, weights) {
  const blocks = [];
  let offset = 0;
  layer.forEach((item, at) => {
    let block = { at: wishes[at] - offset, weight: weights[at], items: [[item, offset]] };
    while (blocks.length && blocks[blocks.length - 1].at > block.at) {
      const other = blocks.pop();
      const weight = other.weight + block.weight;
      block = {
        at: (other.at * other.weight + block.at * block.weight) / weight, weight, items: [...other.items, ...block.items],
      };
    }
    blocks.push(block);
    offset += item.w + GAP_X;
  });
  for (const block of blocks) for (const [item, from] of block.items) item.x = block.at + from;
}
