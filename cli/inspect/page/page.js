// The live parts of the page: search, the mesh, pictures drawn when a line is opened. Data are numbers only; names are
// read from the page as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const unrolled = (runs) => {
    const all = [];
    for (let i = 0; runs && i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k++) all.push(runs[i]);
    return all;
  };
  const stored = unrolled(data.stored), held = unrolled(data.held);
  const mesh = data.mesh.length ? data.mesh : stored.length ? [stored.length] : [];
  const meshNames = [...document.querySelectorAll("#dims li")].map((li) => li.textContent);
  const ranks = Math.max(mesh.reduce((a, b) => a * b, mesh.length ? 1 : 0), stored.length);
  let chosen = null;

  const make = (tag, attributes = {}, text) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const draw = (parent, tag, attributes, text) => {
    const e = document.createElementNS(SVG, tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    parent.append(e);
    return e;
  };
  const hue = (rank) => Math.round(ranks ? rank * 320 / ranks + 210 : rank * 45 + 210) % 360;
  const bytes = (n) => {
    const units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
    let u = 0;
    while (n >= 999.5 && u < 5) { n /= 1000; u++; }
    return (u === 0 ? n : n.toPrecision(3)) + " " + units[u];
  };
  const coordinate = (rank) => {
    const at = [];
    for (let d = mesh.length - 1; d >= 0; d--) { at[d] = rank % mesh[d]; rank = Math.floor(rank / mesh[d]); }
    return at;
  };
  // Parses "0-3,8" into numbers.
  const list = (text) => text.split(",").flatMap((run) => {
    const [a, b] = run.split("-").map(Number);
    return Array.from({ length: (b === undefined ? a : b) - a + 1 }, (_, i) => a + i);
  });
  const holders = (k, cell) => k.r === undefined ? null : k.r === 1 ? [cell] : list(k.r[cell]);
  const label = (who, cell) => who === null ? "chunk " + cell
    : (who.length === 1 ? "rank " : "ranks ") + shorten(who);
  const shorten = (who) => {
    const runs = [];
    for (let i = 0, e; i < who.length; i = e) {
      for (e = i + 1; e < who.length && who[e] === who[e - 1] + 1; e++);
      runs.push(e - i > 2 ? who[i] + "-" + who[e - 1] : who.slice(i, e).join(", "));
    }
    return runs.length > 8 ? runs.slice(0, 8).join(", ") + ", …" : runs.join(", ");
  };
  const offsets = (axis, size) => {
    const at = Array.isArray(axis) ? axis.slice() : Array.from({ length: axis.n }, (_, i) => i * axis.step);
    at.push(size);
    return at;
  };

  const count = (axis) => Array.isArray(axis) ? axis.length : axis.n;

  // Draws one tensor. If more than two dimensions are sharded, there is a picture for each part of the others.
  const pictures = (k) => {
    if (k.s.length === 0) return [];
    const cut = k.a.map((axis, d) => [count(axis), d]).filter(([n]) => n > 1).map(([, d]) => d);
    const outer = cut.slice(0, -2), inner = cut.slice(-2);
    const dims = [...inner, ...k.s.map((_, d) => d).filter((d) => !cut.includes(d))].slice(0, 2).sort((a, b) => a - b);
    let parts = [[]];
    for (const d of outer) parts = parts.flatMap((at) => Array.from({ length: count(k.a[d]) }, (_, i) => [...at, [d, i]]));
    const shown = parts.slice(0, 16).map((at) => {
      const svg = picture(k, dims.length > 1 ? dims : [dims[0], -1], at);
      if (at.length === 0) return svg;
      const figure = make("figure"), of = at.map(([d, i]) => {
        const bounds = offsets(k.a[d], k.s[d]);
        return "dim " + d + ": " + bounds[i] + ":" + bounds[i + 1];
      });
      figure.append(make("figcaption", {}, of.join(", ")), svg);
      return figure;
    });
    if (parts.length > 16) shown.push(make("p", { class: "note" }, "… and " + (parts.length - 16) + " more"));
    return shown;
  };

  // Draws dimension `row` downwards and `column` (-1: none) to the right, at one place in the dimensions of `at`. To scale, but
  // each cell has room for its ranks.
  const picture = (k, [row, column], at) => {
    const fixed = new Map(at), shape = k.a.map(count);
    const cellOf = (r, c) => shape.reduce((cell, n, d) => cell * n + (d === row ? r : d === column ? c : fixed.get(d) || 0), 0);
    const ys = offsets(k.a[row], k.s[row]), xs = column < 0 ? [0, 1] : offsets(k.a[column], k.s[column]);
    const most = Math.max(ys[ys.length - 1], xs[xs.length - 1]), cells = (xs.length - 1) * (ys.length - 1);
    const across = xs.length - 1;
    const texts = Array.from({ length: Math.min(cells, 64) }, (_, i) => {
      const cell = cellOf(Math.floor(i / across), i % across);
      return label(holders(k, cell), cell).length * 6.7 + 14;
    });
    const side = (cuts, each, limit) =>
      Math.max(240 * cuts[cuts.length - 1] / most, Math.min((cuts.length - 1) * each, limit), each);
    const high = side(ys, 22, 480), wide = side(xs, Math.max(...texts, 60), 720);
    const left = 12 + 7.2 * String(ys[ys.length - 1]).length + 10, top = 34;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", left + wide + 40);
    svg.setAttribute("height", top + high + 12);
    svg.setAttribute("role", "img");
    const y = (v) => top + high * v / ys[ys.length - 1], x = (v) => left + wide * v / xs[xs.length - 1];
    const said = [];
    for (let r = 0; r + 1 < ys.length; r++) {
      for (let c = 0; c + 1 < xs.length; c++) {
        const cell = cellOf(r, c), who = holders(k, cell), text = label(who, cell);
        const w = x(xs[c + 1]) - x(xs[c]), h = y(ys[r + 1]) - y(ys[r]);
        const g = draw(svg, "g", chosen !== null && who && !who.includes(chosen) ? { class: "dim" } : {});
        const rect = draw(g, "rect", { x: x(xs[c]), y: y(ys[r]), width: w, height: h });
        if (w < 4 || h < 4) rect.style.stroke = "none";
        rect.style.fill = `hsl(${hue(who ? who[0] : cell)} 55% var(--light))`;
        const range = k.s.map((n, d) => {
          const bounds = fixed.has(d) ? offsets(k.a[d], n) : null, i = fixed.get(d);
          return d === row ? ys[r] + ":" + ys[r + 1] : d === column ? xs[c] + ":" + xs[c + 1] : bounds ? bounds[i] + ":" + bounds[i + 1] : "0:" + n;
        });
        draw(g, "title", {}, text + ": [" + range.join(", ") + "]");
        const short = who === null ? String(cell) : shorten(who);
        const fit = [text, short].find((t) => t.length * 6.7 + 6 < w);
        if (fit && h >= 13) draw(g, "text", { class: "in", x: x(xs[c]) + w / 2, y: y(ys[r]) + h / 2 }, fit);
        if (said.length < 16) said.push(text + (who && who.length > 1 ? " have [" : " has [") + range.join(", ") + "]");
      }
    }
    svg.setAttribute("aria-label", said.join("; ") + (said.length === 16 ? " …" : ""));
    let last = -99;
    for (const v of ys) if (y(v) - last >= (ys.length > 40 ? 28 : 12)) { last = y(v); draw(svg, "text", { x: left - 6, y: last + 4, "text-anchor": "end" }, v); }
    last = -99;
    for (const v of xs) {
      if (column >= 0 && x(v) - last >= 7.2 * String(v).length + 10) {
        last = x(v);
        draw(svg, "text", { x: last, y: top - 6, "text-anchor": v === 0 ? "start" : "middle" }, v);
      }
    }
    draw(svg, "text", { x: 2, y: 11 }, "dim " + row + " ↓" + (column >= 0 ? "   dim " + column + " →" : ""));
    return svg;
  };

  const chunks = (k) => {
    const table = make("table"), head = table.createTHead().insertRow();
    for (const text of ["Chunk", "Offsets", "Sizes"]) head.append(make("th", { scope: "col" }, text));
    const body = table.createTBody();
    k.b.forEach((box, i) => {
      const tr = body.insertRow(), half = box.length / 2, who = k.w && k.w[i] >= 0 ? "rank " + k.w[i] : "chunk " + i;
      for (const text of [who, box.slice(0, half).join(", "), box.slice(half).join(", ")]) tr.insertCell().textContent = text;
    });
    return table;
  };

  // Makes a list of the lines "term: text" of a paragraph.
  const listOf = (p) => {
    const list = make("dl", { class: p.className });
    for (const line of p.textContent.split("\n").filter(Boolean)) {
      const at = line.indexOf(": "), row = make("div");
      row.append(make("dt", {}, line.slice(0, at)), make("dd", {}, line.slice(at + 2)));
      list.append(row);
    }
    p.replaceWith(list);
    return list;
  };
  // Completes the details of a line when it is opened for the first time.
  const complete = (leaf) => {
    const detail = leaf.querySelector(".detail");
    if (leaf.querySelector(".picture")) return;
    const [first] = [...detail.querySelectorAll("p")].map(listOf), row = make("div");
    row.append(make("dt", {}, "Name"), make("dd", { class: "name" }, leaf.dataset.name));
    first.prepend(row);
    detail.append(make("div", { class: "values" }), make("div", { class: "picture scroll" }));
    detail.setAttribute("role", "group");
    detail.setAttribute("aria-label", "Details of " + leaf.dataset.name);
  };
  const fill = (leaf) => {
    complete(leaf);
    const place = leaf.querySelector(".picture"), k = data.kinds[leaf.dataset.k];
    if (!k) return;
    place.textContent = "";
    place.append(...(k.a ? pictures(k) : k.b ? [chunks(k)] : []));
    if (place.childNodes.length) {
      const label = "How " + leaf.dataset.name + " is sharded";
      for (const [key, value] of Object.entries({ role: "region", tabindex: 0, "aria-label": label })) place.setAttribute(key, value);
    }
    showValues(leaf);
  };

  // ---- statistics ----

  const HEIGHTS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", BINS = 64;
  // The histogram of a tensor, with bins as shares of its values; null without one.
  const histogram = ([, , , , , , , from, to, below, above, text]) => {
    if (text === undefined) return null;
    const bins = [...text].map((c) => HEIGHTS.indexOf(c)), sum = bins.reduce((a, b) => a + b, 0) || 1;
    return { from, to, below, above, bins: bins.map((n) => n / sum) };
  };
  // Joins histograms: each bin is divided among those that it covers on a common axis.
  const joined = (all) => {
    if (all.length < 2) return all[0] || null;
    const from = Math.min(...all.map((h) => h.from)), to = Math.max(...all.map((h) => h.to));
    const sum = { from, to, below: 0, above: 0, bins: Array(BINS).fill(0) };
    for (const h of all) {
      sum.below += h.below;
      sum.above += h.above;
      h.bins.forEach((share, i) => {
        const at = (x) => to > from ? (x - from) / (to - from) * BINS : 0, step = (h.to - h.from) / BINS;
        const a = at(h.from + i * step), b = Math.max(at(h.from + (i + 1) * step), a + 1e-9);
        for (let k = Math.floor(a); k < b && k < BINS; k++) sum.bins[k] += share * (Math.min(b, k + 1) - Math.max(a, k)) / (b - a);
        if (a >= BINS) sum.bins[BINS - 1] += share;
      });
    }
    return sum;
  };
  const short = (x) => String(Number(x.toPrecision(4)));
  const outline = (h, wide, high) => {
    const most = Math.max(...h.bins), step = wide / BINS;
    return "M0 " + high + h.bins.map((n, i) => `V${(high - high * n / most).toFixed(1)}H${((i + 1) * step).toFixed(1)}`).join("") + "V" + high + "Z";
  };
  const spark = (h) => {
    const svg = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries({ class: "spark", viewBox: "0 0 96 18", "aria-hidden": "true" })) svg.setAttribute(key, value);
    draw(svg, "path", { d: outline(h, 96, 18) });
    return svg;
  };
  const largeHistogram = (h) => {
    const svg = document.createElementNS(SVG, "svg"), wide = 380, high = 90;
    const outside = [h.below && h.below.toLocaleString("en") + " below", h.above && h.above.toLocaleString("en") + " above"].filter(Boolean).join(", ");
    svg.setAttribute("viewBox", `0 0 ${wide} ${high + 20}`);
    svg.setAttribute("class", "histogram");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "Histogram from " + short(h.from) + " to " + short(h.to) + (outside ? "; " + outside : ""));
    draw(svg, "path", { d: outline(h, wide, high) });
    draw(svg, "line", { x1: 0, x2: wide, y1: high, y2: high });
    const zero = (0 - h.from) / (h.to - h.from) * wide;
    if (zero > 40 && zero < wide - 40) {
      draw(svg, "line", { class: "zero", x1: zero, x2: zero, y1: 0, y2: high });
      draw(svg, "text", { x: zero, y: high + 14, "text-anchor": "middle" }, "0");
    }
    draw(svg, "text", { x: 0, y: high + 14 }, short(h.from));
    draw(svg, "text", { x: wide, y: high + 14, "text-anchor": "end" }, short(h.to));
    const parts = [svg];
    if (outside) parts.push(make("p", { class: "note" }, "Not in the picture, further than six deviations from the mean: " + outside));
    return parts;
  };
  const ROWS = 256;
  // The histogram of an open line, and its tensors if there are several.
  const showValues = (leaf) => {
    const place = leaf.querySelector(".values"), all = data.stats && data.stats[leaf.dataset.s];
    if (!all || place.childNodes.length) return;
    const sum = joined(all.map(histogram).filter(Boolean));
    if (sum) place.append(...largeHistogram(sum));
    if (all.length < 2) return;
    const box = make("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "The tensors of " + leaf.dataset.name });
    const table = make("table", { class: "each" }), head = table.createTHead().insertRow(), body = table.createTBody();
    const titles = ["Name", "Mean", "Deviation", "Smallest", "Largest", "Zeros", "NaN", "Infinite", "Histogram"];
    for (const text of titles) head.append(make("th", { scope: "col" }, text));
    const list = expand(leaf.dataset.name) || [];
    all.slice(0, ROWS).forEach((tensor, i) => {
      const tr = body.insertRow(), h = histogram(tensor);
      tr.append(make("th", { scope: "row", class: "name" }, list[i] || String(i)));
      tensor.slice(0, 7).forEach((text, c) => tr.append(make("td", { class: c > 4 && text !== "0" ? "num bad" : "num", "data-title": titles[c + 1] }, text)));
      const cell = tr.insertCell();
      if (h) cell.append(spark(h));
    });
    box.append(table);
    place.append(box);
    if (all.length > ROWS) place.append(make("p", { class: "note" }, "… and " + (all.length - ROWS) + " more"));
  };
  const tree = $("tree");
  if (tree) {
    tree.addEventListener("toggle", (e) => { if (e.target.open && e.target.matches(".leaf")) fill(e.target); }, true);
  }

  // Draws the mesh: the last dimension from left to right, the one before it downwards, others as panels.
  const showMesh = () => {
    const place = $("mesh");
    if (!place || mesh.length === 0) return;
    place.textContent = "";
    if (mesh.length === 1 && ranks > 64) return;
    const n = mesh.length, columns = mesh[n - 1], rows = n > 1 ? mesh[n - 2] : 1, panel = rows * columns;
    const limit = Math.min(ranks, 1024);
    for (let first = 0; first < limit; first += panel) {
      const table = make("table", { class: "mesh" }), at = coordinate(first);
      const outer = at.slice(0, Math.max(n - 2, 0)).map((i, d) => meshNames[d] + " " + i).join(", ");
      const axes = (n > 1 ? meshNames[n - 2] + " ↓ " : "") + (meshNames[n - 1] || "ranks") + " →";
      table.append(make("caption", {}, outer ? outer + ": " + axes : axes));
      const wrap = n === 1 ? 16 : columns;
      for (let r = first; r < Math.min(first + panel, limit); r += wrap) {
        const tr = table.insertRow();
        if (n > 1) tr.append(make("th", { scope: "row" }, coordinate(r)[n - 2]));
        for (let c = r; c < Math.min(r + wrap, first + panel, limit); c++) {
          const td = tr.insertCell();
          td.textContent = c;
          td.title = "rank " + c + (n > 1 ? ": " + coordinate(c).map((i, d) => meshNames[d] + " " + i).join(", ") : "");
          td.style.setProperty("--h", hue(c));
          if (c === chosen) td.className = "on";
          else if (chosen !== null) td.className = "off";
          td.addEventListener("click", () => choose(c === chosen ? null : c));
        }
      }
      place.append(table);
    }
    if (limit < ranks) place.append(make("p", { class: "note" }, "… and " + (ranks - limit) + " more ranks"));
  };

  const choose = (rank) => {
    chosen = rank;
    const input = $("rank"), out = $("rank-says");
    if (input) input.value = rank === null ? "" : rank;
    if (out) {
      const at = rank === null || mesh.length < 2 ? "" : " (" + coordinate(rank).map((i, d) => meshNames[d] + " " + i).join(", ") + ")";
      out.textContent = rank === null ? "" : "rank " + rank + at +
        (stored[rank] !== undefined ? ", stores " + bytes(stored[rank]) : "") +
        (held[rank] !== undefined ? ", holds " + bytes(held[rank]) : "");
    }
    showMesh();
    document.querySelectorAll(".leaf[open]").forEach(fill);
  };

  const number = (text) => /^\d+$/.test(text) && Number(text) < ranks ? Number(text) : null;

  // Draws the bytes of each rank as bars: what it stores, and behind that what it holds.
  const showBars = () => {
    const place = $("bars"), most = Math.max(...stored, ...held, 1);
    if (!place || stored.length < 2) return;
    const n = stored.length, high = 90, left = 64, room = Math.max(place.clientWidth - left - 12, 200);
    const step = Math.max(Math.min(room / n, 28), .2);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", left + step * n + 10);
    svg.setAttribute("height", high + 34);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "Bytes of each rank; the same numbers are in the list above.");
    draw(svg, "text", { x: left - 6, y: 14, "text-anchor": "end" }, bytes(most));
    draw(svg, "text", { x: left - 6, y: high + 10, "text-anchor": "end" }, "0");
    for (let i = 0; i < n; i++) {
      const g = draw(svg, "g", {}), gap = step > 4 ? 2 : 0;
      draw(g, "title", {}, "rank " + i + ": stores " + bytes(stored[i]) + (held.length ? ", holds " + bytes(held[i]) : ""));
      for (const [value, part] of [[held[i] || 0, .35], [stored[i], 1]]) {
        const h = high * value / most;
        const bar = draw(g, "rect", { x: left + i * step, y: 10 + high - h, width: step - gap, height: h, opacity: part });
        bar.style.fill = `hsl(${hue(i)} 50% var(--shade))`;
        bar.style.stroke = "none";
      }
      const every = Math.ceil((7 * String(n).length + 8) / step);
      if (i % every === 0) draw(svg, "text", { x: left + (i + .5) * step, y: high + 26, "text-anchor": "middle" }, i);
    }
    place.append(svg);
    if (held.length) place.append(make("p", { class: "note" }, "Strong colour: what the rank stores. Pale: what it holds in memory, with replicas that another rank stores."));
  };

  // Search: each word must be in the name, the type or the shape. {0..31} stands for its names.
  const numbers = (set) => set.split(",").flatMap((part) => {
    const [a, b, step] = part.split("..").map(Number), all = [];
    for (let i = a; i <= (b === undefined ? a : b) && all.length < 100000; i += step || 1) all.push(i);
    return all;
  });
  // The names that a pattern stands for, in the order of data.stats; null if there are too many.
  const expand = (pattern) => {
    let all = [""];
    for (const part of pattern.split(/(\{[\d.,]+\})/)) {
      const set = /^\{[\d.,]+\}$/.test(part) ? numbers(part.slice(1, -1)) : [part];
      if (all.length * set.length > 100000) return null;
      all = all.flatMap((a) => set.map((b) => a + b));
    }
    return all;
  };
  const spelled = new Map();
  const names = (pattern) => {
    if (!spelled.has(pattern)) spelled.set(pattern, (expand(pattern) || [pattern]).join("\n").toLowerCase());
    return spelled.get(pattern);
  };
  const leaves = [...document.querySelectorAll(".leaf")];
  const before = new Map();
  const search = (query) => {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const modules = [...document.querySelectorAll("#tree details:not(.leaf)")];
    if (before.size === 0) modules.forEach((m) => before.set(m, m.open));
    let found = 0;
    for (const leaf of leaves) {
      const pattern = leaf.dataset.name, other = leaf.querySelector("summary").textContent.toLowerCase();
      leaf.hidden = !words.every((w) => pattern.toLowerCase().includes(w) || other.includes(w.replace(/(\d)x(?=\d)/g, "$1×")) ||
        (/\d/.test(w) && pattern.includes("{") && names(pattern).includes(w)));
      found += !leaf.hidden;
    }
    for (const m of modules.reverse()) {
      m.hidden = words.length > 0 && !m.querySelector(".leaf:not([hidden])");
      m.open = words.length > 0 ? !m.hidden : before.get(m);
    }
    if (words.length === 0) before.clear();
    $("found").textContent = words.length ? found + " of " + leaves.length + " lines" : "";
  };

  if ($("search")) {
    $("search").addEventListener("input", (e) => search(e.target.value));
    $("open").addEventListener("click", () => tree.querySelectorAll("details:not(.leaf)").forEach((d) => { d.open = true; }));
    $("close").addEventListener("click", () => tree.querySelectorAll("details").forEach((d) => { d.open = false; }));
    document.addEventListener("keydown", (e) => {
      if (e.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { e.preventDefault(); $("search").focus(); }
      if (e.key === "Escape" && document.activeElement === $("search")) { $("search").value = ""; search(""); }
    });
  }
  if ($("rank")) {
    $("rank").addEventListener("change", (e) => choose(number(e.target.value)));
  }
  // page.html#search=q_proj&open=NAME&rank=5: the state that a link to the page can set.
  const follow = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    if (wanted.has("rank")) choose(number(wanted.get("rank")));
    if (wanted.has("search") && $("search")) { $("search").value = wanted.get("search"); search(wanted.get("search")); }
    for (const leaf of leaves.filter((l) => l.dataset.name === wanted.get("open"))) {
      for (let e = leaf; e && e !== tree; e = e.parentElement) e.open = true;
      leaf.scrollIntoView();
    }
  };
  // ---- keyboard and screen reader ----

  // The summaries are the items of an ARIA tree. One of them is in the order of Tab; arrows move among those that are visible.
  const start = (text) => text.trim().toLowerCase();
  const children = (of) => [...of.children].filter((e) => e.tagName === "DETAILS");
  const itemOf = (details) => details.querySelector("summary");
  const prepare = (parent, level) => {
    children(parent).forEach((details, i, all) => {
      const item = itemOf(details);
      if (item.hasAttribute("role")) return;
      details.setAttribute("role", "none");
      const says = { role: "treeitem", "aria-level": level, "aria-setsize": all.length, "aria-posinset": i + 1, "aria-expanded": details.open, tabindex: -1 };
      for (const [key, value] of Object.entries(says)) item.setAttribute(key, value);
      if (details.open) prepare(details, level + 1);
    });
  };
  let current = null;
  const focusable = (item) => {
    if (current) current.tabIndex = -1;
    current = item;
    item.tabIndex = 0;
  };
  const visible = () => {
    const all = [];
    const add = (parent) => children(parent).forEach((d) => { if (!d.hidden) { all.push(itemOf(d)); if (d.open) add(d); } });
    add(tree);
    return all;
  };
  const parentOf = (details) => details.parentElement === tree ? null : itemOf(details.parentElement);
  const move = (item, key) => {
    const details = item.parentElement, all = visible(), at = all.indexOf(item);
    if (key === "ArrowDown") return all[at + 1];
    if (key === "ArrowUp") return all[at - 1];
    if (key === "Home") return all[0];
    if (key === "End") return all[all.length - 1];
    if (key === "ArrowRight" && !details.open) details.open = true;
    else if (key === "ArrowRight") return children(details).filter((d) => !d.hidden).map(itemOf)[0];
    else if (key === "ArrowLeft" && details.open) details.open = false;
    else if (key === "ArrowLeft") return parentOf(details);
    else if (key === "*") children(details.parentElement).filter((d) => !d.matches(".leaf")).forEach((d) => { d.open = true; });
    else return [...all.slice(at + 1), ...all.slice(0, at)].find((e) => start(e.textContent).startsWith(key.toLowerCase()));
    return item;
  };
  if (tree) {
    tree.setAttribute("role", "tree");
    tree.setAttribute("aria-label", "Modules and tensors");
    prepare(tree, 1);
    if (tree.querySelector("summary")) focusable(tree.querySelector("summary"));
    tree.addEventListener("toggle", (e) => {
      const item = itemOf(e.target);
      if (item) item.setAttribute("aria-expanded", e.target.open);
      if (e.target.open && item) prepare(e.target, Number(item.getAttribute("aria-level")) + 1);
    }, true);
    tree.addEventListener("focusin", (e) => { if (e.target.matches("summary")) focusable(e.target); });
    tree.addEventListener("keydown", (e) => {
      const letter = e.key.length === 1 && /\S/.test(e.key) && e.key !== "/";
      if (!e.target.matches("summary") || e.ctrlKey || e.metaKey || e.altKey) return;
      if (!letter && !/^(Arrow(Up|Down|Left|Right)|Home|End)$/.test(e.key)) return;
      const next = move(e.target, e.key);
      e.preventDefault();
      if (next) next.focus();
    });
  }
  // Small histograms are drawn when their line comes into view.
  if (data.stats && window.IntersectionObserver) {
    const seen = new IntersectionObserver((entries) => entries.filter((e) => e.isIntersecting).forEach(({ target }) => {
      const h = joined((data.stats[target.dataset.s] || []).map(histogram).filter(Boolean));
      seen.unobserve(target);
      if (h) target.querySelector(".dt").before(spark(h));
    }));
    leaves.forEach((leaf) => seen.observe(leaf));
  }
  window.addEventListener("hashchange", follow);
  document.querySelectorAll(".live").forEach((e) => { e.hidden = false; });
  showMesh();
  showBars();
  follow();
  leaves.filter((leaf) => leaf.open).forEach(fill);
})();
