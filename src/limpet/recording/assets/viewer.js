// The viewer reads trajectories, from files or frame by frame, and shows one frame of each side by side.
"use strict";
const limpet = (() => {
  const FIXED = 1, DEFICIT = 65535, PROB = 255; // bit 0 is the mask "fixed"; the integers that stand for 1
  const STYLED = ["fixed", "committed", "visible", "chosen", "revised"]; // masks with a style of their own; the others share three
  const ACTIONS = ["chosen", "revised"]; // masks of what a call did; the others are of the state of a position
  const MEANINGS = { // of what the legend names: a few words, and the tooltip
    fixed: ["given at first", "Part of the prompt, or fixed by hand; it never changes."],
    committed: ["kept, hidden", "Committed in an earlier call, and no longer in the model input."],
    visible: ["kept, shown", "Committed in an earlier call, and in the model input."],
    chosen: ["kept from now", "Committed by this call: stored as the most probable token, and in the model input from the next call on."],
    revised: ["kept, changed", "A committed token that this call changed."],
    changed: ["new since last", "Another token than one call before."],
    clue: ["given by puzzle", "A cell that the puzzle gives."],
    clash: ["breaks a rule", "An equal digit in the row, column or box, or another digit than the clue."],
    t: ["share of noise", "The time of the call, from 1, where every token is noise, to 0, the output."],
    deficit: ["mean doubt left", "The confidence deficit, 1 minus the largest predicted probability, as a mean over the positions that are not fixed."],
  };
  const LEVELS = 8; // of shading
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const narrow = matchMedia("(max-width: 40rem)");

  // Create an element. Text is only ever set as text: no string is parsed as HTML anywhere on this page.
  function make(tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== "") element.textContent = text;
    return element;
  }

  function svg(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  // Bytes

  const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

  async function through(bytes, transform) {
    return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(transform)).arrayBuffer());
  }

  // A frame from its bytes, in the order of Header.layout in trajectory.py. Parts are copied, since typed arrays must be aligned.
  function unpack(header, bytes) {
    const wide = header.vocab_size > 65536, length = header.length, several = length * header.candidates;
    const Token = wide ? Uint32Array : Uint16Array;
    let start = 0;
    const take = (Kind, count) => {
      const size = count * Kind.BYTES_PER_ELEMENT;
      const part = bytes.slice(start, start + size);
      start += size;
      return new Kind(part.buffer);
    };
    return {
      t: take(Float64Array, 1)[0], tokens: take(Token, length), modelInput: take(Token, length), masks: take(Uint8Array, length),
      deficit: take(Uint16Array, length), topTokens: take(Token, several), topProbs: take(Uint8Array, several),
    };
  }

  function frameBytes(header) {
    const token = header.vocab_size > 65536 ? 4 : 2;
    return 8 + header.length * (2 * token + 3 + header.candidates * (token + 1));
  }

  // Trajectories: what the file holds, and what follows from it

  function newTrajectory(header) {
    return { header, tokenTexts: new Map(), frames: [], raw: [], text: null, scores: {}, drawing: null, classes: [] };
  }

  const total = (trajectory) => trajectory.header.calls + 1;
  const stopped = (trajectory) => !state.live && (trajectory.frames.length < total(trajectory) || trajectory.header.calls < trajectory.header.sampler.nfe);
  const textOf = (trajectory) => trajectory.text ?? [...trajectory.frames.at(-1)?.modelInput ?? []].map((token) => trajectory.tokenTexts.get(token) ?? "").join("");

  // CSS classes for the colour of each sampler: native, top-p, CRS and Mend have their own, all others use three in rotation.
  // A second class numbers the samplers of one colour, which shapes and dashes tell apart.
  function stylesOf(samplers) {
    const rivals = [], counts = {};
    return samplers.map((sampler) => {
      const sharp = ["top_p", "late_top_p"].some((name) => sampler[name] != null && sampler[name] < 1);
      let own = sampler.sampler === "native" && sharp ? "top-p" : sampler.sampler;
      if (!["native", "top-p", "crs", "mend"].includes(own)) {
        if (!rivals.includes(own)) rivals.push(own);
        own = `rival${rivals.indexOf(own) % 3}`;
      }
      counts[own] = (counts[own] ?? -1) + 1;
      return { family: own, classes: `is-${own} nth${counts[own] % 4}` };
    });
  }

  // The CSS classes of a mask, and of all masks in a byte.
  function classOf(trajectory, name) {
    if (STYLED.includes(name)) return name;
    return `other other${trajectory.header.masks.filter((mask) => !STYLED.includes(mask)).indexOf(name) % 3}`;
  }

  function masksIn(trajectory, byte) { return trajectory.header.masks.filter((_, bit) => byte >> bit & 1); }

  function classesOf(trajectory, byte) {
    return trajectory.classes[byte] ??= masksIn(trajectory, byte).map((name) => ` ${classOf(trajectory, name)}`).join("");
  }

  // Boards: a trajectory whose rows are a sudoku is drawn as the grid of its solution. A row is a mark, the cells of the
  // puzzle, a mark, and the cells of the solution, which begin at position `first`. Boxes have `height` rows.

  const BOARDS = Object.fromEntries([["sudoku", 9, 3, 3], ["sudoku-6x6", 6, 2, 3]].map(([layout, side, height, width]) => {
    const cells = side * side, places = Array.from({ length: cells }, (_, cell) => [Math.floor(cell / side), cell % side]);
    const kinds = [([row]) => row, ([, column]) => column, ([row, column]) => row - row % height + Math.floor(column / width)];
    const units = kinds.flatMap((unitOf) => Array.from({ length: side }, (_, u) => [...places.keys()].filter((cell) => unitOf(places[cell]) === u)));
    return [layout, { side, height, width, cells, places, units, first: cells + 2 }];
  }));

  function boardOf({ header }) {
    const board = Object.hasOwn(BOARDS, header.layout) ? BOARDS[header.layout] : null;
    return board?.first + board?.cells === header.length ? board : null;
  }
  const firstPosition = (trajectory) => boardOf(trajectory)?.first ?? 0; // the positions before it are not drawn
  const isDigit = (text) => /^[1-9]$/.test(text);

  // The sides at which a cell of a board touches another box, or the edge: "left top".
  function sidesOf({ side, height, width, places }, cell) {
    const [row, column] = places[cell];
    const sides = { left: column % width === 0, top: row % height === 0, right: column === side - 1, bottom: row === side - 1 };
    return Object.keys(sides).filter((name) => sides[name]).join(" ");
  }

  // The clue of a position of a frame, or "".
  function clueAt(trajectory, frame, i) {
    const board = boardOf(trajectory);
    const text = board && i >= board.first ? trajectory.tokenTexts.get(frame.tokens[i - board.cells - 1]) ?? "" : "";
    return isDigit(text) ? text : "";
  }

  // The additional classes of every position: " clue", " clash".
  function boardClasses(trajectory, frame, tokens) {
    const { first, places, units } = boardOf(trajectory);
    const cells = places.map((_, cell) => trajectory.tokenTexts.get(tokens[first + cell]) ?? "");
    const clues = cells.map((_, cell) => clueAt(trajectory, frame, first + cell));
    const wrong = cells.map((text, cell) => clues[cell] !== "" && text !== clues[cell]);
    for (const unit of units) {
      for (const cell of unit) wrong[cell] ||= isDigit(cells[cell]) && unit.filter((other) => cells[other] === cells[cell]).length > 1;
    }
    return { wrong, classes: cells.map((_, cell) => `${clues[cell] && " clue"}${wrong[cell] ? " clash" : ""}`) };
  }

  function positionName(i) {
    const boards = state.trajectories.map(boardOf), [board] = boards;
    if (!board || boards.some((other) => other !== board)) return `Position ${i + 1}`;
    const [row, column] = board.places[i - board.first];
    return `Row ${row + 1}, column ${column + 1}`;
  }

  function addFrame(trajectory, bytes, tokenTexts) {
    for (const [token, text] of Object.entries(tokenTexts)) trajectory.tokenTexts.set(Number(token), text);
    const frame = unpack(trajectory.header, bytes), length = trajectory.header.length, r = trajectory.frames.length;
    const before = r ? trajectory.frames[r - 1] : null;
    const last = r === total(trajectory) - 1;
    const Token = frame.tokens.constructor;
    frame.top = new Token(length);
    frame.since = new Uint16Array(length); // the frame in which the shown token appeared
    frame.topSince = new Uint16Array(length);
    frame.counts = trajectory.header.masks.map((_, bit) => frame.masks.reduce((sum, byte) => sum + (byte >> bit & 1), 0));
    frame.changed = 0;
    let deficit = 0, free = 0;
    for (let i = 0; i < length; i++) {
      const isFixed = frame.masks[i] & FIXED;
      frame.top[i] = isFixed || last ? frame.tokens[i] : frame.topTokens[i * trajectory.header.candidates];
      frame.since[i] = before && before.modelInput[i] === frame.modelInput[i] ? before.since[i] : r;
      frame.topSince[i] = before && before.top[i] === frame.top[i] ? before.topSince[i] : r;
      if (r && frame.since[i] === r) frame.changed++;
      if (!isFixed) { free++; deficit += frame.deficit[i]; }
    }
    frame.meanDeficit = last ? null : deficit / DEFICIT / Math.max(1, free);
    trajectory.raw.push(bytes);
    trajectory.frames.push(frame);
  }

  async function readFile(base64) {
    const bytes = await through(fromBase64(base64), new DecompressionStream("gzip"));
    const end = bytes.indexOf(10);
    const { token_texts: tokenTexts, text, scores, drawing = null, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
    const trajectory = newTrajectory(header), size = frameBytes(header);
    for (let start = end + 1; start < bytes.length; start += size) {
      addFrame(trajectory, bytes.subarray(start, start + size), start === end + 1 ? tokenTexts : {});
    }
    return Object.assign(trajectory, { text, scores, drawing });
  }

  async function fileOf(trajectory) {
    const texts = Object.fromEntries([...trajectory.tokenTexts].sort((a, b) => a[0] - b[0]));
    const { format, version, ...rest } = trajectory.header;
    const calls = Math.min(trajectory.header.calls, trajectory.frames.length - 1); // fewer in a run that was stopped
    const values = { format, version, ...rest, calls, text: trajectory.text, scores: trajectory.scores, token_texts: texts };
    if (trajectory.drawing) values.drawing = trajectory.drawing;
    const line = new TextEncoder().encode(JSON.stringify(values) + "\n");
    return through(new Blob([line, ...trajectory.raw]), new CompressionStream("gzip"));
  }

  function download(name, content, type) {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name.replace(/[^\w.-]+/g, "-");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Token texts as they are shown: an empty one takes some room, and a line break is visible.
  const visibleText = (text) =>
    (text === "" ? "·" : text).replace(/\n/g, "↵\n").replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "␣");
  const flatText = (text) => visibleText(text).replace(/\n/g, "");

  const state = {
    trajectories: [], views: [], at: 0, follow: true, live: false, timer: null, hovered: null, pinned: null, anchor: null,
    show: "input", colour: "confidence", onFix: null, // fixes a word in the next run, where there is a form
  };

  const frames = () => Math.max(1, ...state.trajectories.map(total));
  const arrived = () => Math.max(0, ...state.trajectories.map((trajectory) => trajectory.frames.length));
  const frameAt = (trajectory, r) => trajectory.frames[Math.min(r, trajectory.frames.length - 1)];

  function begin(headers) {
    pause();
    Object.assign(state, { trajectories: headers.map(newTrajectory), at: 0, follow: true, live: true, hovered: null, pinned: null });
    build();
  }

  function build() {
    $("viewer").hidden = false;
    $("position").hidden = true;
    $("scrub").max = frames() - 1;
    $("trajectories").replaceChildren();
    const styles = stylesOf(state.trajectories.map((trajectory) => trajectory.header.sampler));
    state.views = state.trajectories.map((trajectory, index) => buildTrajectory(trajectory, index, styles[index]));
    buildTabs();
    buildTimeline();
    buildLegend();
    const { model, seed, sample } = state.trajectories[0].header;
    const keys = state.trajectories.map(({ header: h }) => [h.digest, h.seed, h.sample, h.length].join());
    $("pairing").textContent = state.trajectories.length < 2 ? `${model}, seed ${seed}, sample ${sample}.` : new Set(keys).size === 1
      ? `All samplers used the same randomness: ${model}, seed ${seed}, sample ${sample}.`
      : "The samplers did not use the same randomness: model, seed, sample or length differ.";
  }

  // On a narrow screen one trajectory is shown at a time; a tab or a swipe switches.
  function buildTabs() {
    $("tabs").replaceChildren(...state.views.map((view, index) => {
      const tab = make("button", view.style.classes, state.trajectories[index].header.name);
      tab.type = "button";
      tab.onclick = () => $("trajectories").scrollTo({ left: view.article.offsetLeft - $("trajectories").offsetLeft });
      return tab;
    }));
    markTab();
  }

  function markTab() {
    const at = Math.round($("trajectories").scrollLeft / Math.max(1, $("trajectories").clientWidth));
    [...$("tabs").children].forEach((tab, index) => tab.setAttribute("aria-current", String(index === at)));
  }

  function buildLegend() {
    const masks = new Map(state.trajectories.flatMap((trajectory) => trajectory.header.masks.map((name) => [name, classOf(trajectory, name)])));
    const ofBoards = state.trajectories.some(boardOf) ? [["clue", "clue"], ["clash", "clash"]] : [];
    const items = [...masks, ["changed", "changed"], ...ofBoards].map(([name, classes]) => {
      const item = make("li"), [meaning, tip] = MEANINGS[name] ?? [], sample = make("i", classes);
      if (tip) item.dataset.tip = tip;
      sample.append(make("b", "", name));
      item.append(sample, meaning ? ` ${meaning}` : "");
      return item;
    });
    const [from, to] = { confidence: ["unsure", "sure"], age: ["new", "old"], none: [] }[state.colour];
    if (from) {
      const item = make("li"), scale = make("span", `scale ${state.colour}`);
      scale.append(...Array.from({ length: LEVELS }, (_, level) => make("span", `k${level}`)));
      item.append(make("b", "", state.colour), ` ${from}`, scale, to);
      items.push(item);
    }
    for (const name of ["t", "deficit"]) {
      const item = make("li"), [meaning, tip] = MEANINGS[name];
      item.dataset.tip = tip;
      item.append(make("b", "", name), ` ${meaning}`);
      items.push(item);
    }
    $("legend").replaceChildren(...items);
  }

  function buildTrajectory(trajectory, index, style) {
    const article = make("article", `trajectory trajectory${index} ${style.classes}`), title = make("h2"), header = make("header");
    const text = make("div", "text"), board = boardOf(trajectory), first = firstPosition(trajectory);
    const facts = make("p", "facts"), scores = make("p", "scores"), downloads = make("div", "downloads");
    const asText = make("button", "quiet", "text"), asFile = make("button", "quiet", "trajectory");
    for (const button of [asText, asFile]) { button.type = "button"; button.disabled = true; }
    asText.dataset.tip = "Download the text."; asFile.dataset.tip = "Download the trajectory, for limpet view and limpet watch.";
    const name = `limpet-${trajectory.header.model}-${trajectory.header.seed}-${trajectory.header.name}`;
    asText.onclick = () => download(`${name}.txt`, textOf(trajectory), "text/plain;charset=utf-8");
    asFile.onclick = async () => download(`${name}.limpet`, await fileOf(trajectory), "application/octet-stream");
    downloads.append(asText, asFile);
    const tip = data.descriptions[style.family] ?? data.descriptions[trajectory.header.sampler.sampler];
    const term = make(tip ? "button" : "span", tip ? "term" : "", trajectory.header.name);
    if (tip) Object.assign(term, { type: "button" }).dataset.tip = tip;
    title.append(term);
    header.append(title, downloads, facts);
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Text of ${trajectory.header.name}`);
    const spans = Array.from({ length: trajectory.header.length }, () => text.appendChild(make("span")));
    const texts = spans.map((span) => span.appendChild(document.createTextNode("")));
    spans.forEach((span, i) => { span.position = i; });
    if (board) {
      text.classList.add("board");
      text.style.setProperty("--side", board.side);
      spans.forEach((span, i) => { if (i < first) span.hidden = true; else span.dataset.sides = sidesOf(board, i - first); });
    }
    text.onpointerover = (event) => { if (event.target.position !== undefined) inspect(event.target.position, false, event.target); };
    text.onpointerleave = () => inspect(null, false);
    text.onclick = (event) => {
      const i = event.target.position;
      if (i !== undefined) inspect(state.pinned === i ? null : i, true, event.target);
    };
    text.onfocus = () => { if (text.matches(":focus-visible") && state.pinned === null) inspect(first, true, spans[first]); };
    text.onkeydown = (event) => {
      const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const i = Math.min(trajectory.header.length - 1, Math.max(first, (state.pinned ?? first - move) + move));
      spans[i].scrollIntoView({ block: "nearest" });
      inspect(i, true, spans[i]);
    };
    article.append(header, text, scores);
    $("trajectories").append(article);
    return { trajectory, style, article, text, spans, texts, facts, scores, asText, asFile, classes: [], shown: [] };
  }

  // Show one frame of every trajectory. Only what differs from the last paint is touched.
  function paint() {
    state.trajectories.forEach((trajectory, index) => paintTrajectory(trajectory, state.views[index]));
    const n = frames() - 1, r = state.at, trajectory = state.trajectories.reduce((x, y) => (total(x) < total(y) ? y : x));
    $("scrub").value = r;
    const halted = state.trajectories.some(stopped), at = `call ${r + 1} of ${n} · t ${frameAt(trajectory, r).t.toFixed(3)}`;
    $("where").textContent = r < n ? at : halted ? `stopped at call ${n + 1}` : `output after ${n} calls`;
    $("scrub").setAttribute("aria-valuetext", $("where").textContent);
    for (const cursor of document.querySelectorAll(".chart line")) {
      cursor.setAttribute("x1", r / n * 100);
      cursor.setAttribute("x2", r / n * 100);
    }
    const i = state.pinned ?? state.hovered;
    if (i !== null) paintPosition(i);
  }

  function paintTrajectory(trajectory, view) {
    const frame = frameAt(trajectory, state.at);
    if (!frame) return;
    const r = Math.min(state.at, trajectory.frames.length - 1), last = r === total(trajectory) - 1;
    const isTop = state.show === "top", tokens = isTop ? frame.top : frame.modelInput;
    const since = isTop ? frame.topSince : frame.since, byAge = state.colour === "age";
    const predicted = last ? trajectory.frames[r - 1] : frame; // the output has the confidence of the final step
    const board = boardOf(trajectory) ? boardClasses(trajectory, frame, tokens) : null;
    const first = firstPosition(trajectory);
    let changed = 0;
    for (let i = 0; i < tokens.length; i++) {
      const fresh = r > 0 && since[i] === r;
      if (fresh) changed++;
      const level = byAge ? Math.min(7, Math.floor(Math.log2(1 + r - since[i]) * 1.6))
        : Math.min(7, Math.floor(8 * (1 - predicted.deficit[i] / DEFICIT)));
      const kind = `k${level}${classesOf(trajectory, frame.masks[i])}${fresh ? " changed" : ""}${board?.classes[i - first] ?? ""}`;
      if (view.classes[i] !== kind) { view.spans[i].className = kind; view.classes[i] = kind; }
      if (view.shown[i] !== tokens[i]) {
        view.texts[i].data = visibleText(trajectory.tokenTexts.get(tokens[i]) ?? "\ufffd");
        view.shown[i] = tokens[i];
      }
    }
    const counts = trajectory.header.masks.map((name, bit) => `${frame.counts[bit]} ${name}`).slice(1);
    const clashes = board ? [`${board.wrong.filter(Boolean).length} clashing`] : [];
    view.counted = [...counts, `${changed} changed`, ...clashes];
    const deficit = frame.meanDeficit === null ? [] : [`deficit ${frame.meanDeficit.toFixed(3)}`];
    view.facts.textContent = [...view.counted, ...deficit].join(" · ");
    view.text.classList.toggle("output", last);
    view.drawing?.classList.toggle("pending", !last);
    if (state.pinned !== null || state.hovered !== null) markHere();
  }

  function markHere() {
    const i = state.pinned ?? state.hovered;
    for (const view of state.views) {
      if (view.here !== undefined && view.here !== i) {
        view.spans[view.here]?.classList.remove("here");
        view.classes[view.here] = view.spans[view.here]?.className;
      }
      if (i !== null && view.spans[i]) {
        view.spans[i].classList.add("here");
        view.classes[i] = view.spans[i].className;
        view.here = i;
      }
    }
  }

  // Show the history of a position beside its word: while it is pointed at, or until it is unpinned.
  function inspect(i, pin, anchor = null) {
    if (pin) { state.pinned = i; state.hovered = null; } else state.hovered = i;
    if (anchor && (pin || state.pinned === null)) state.anchor = anchor;
    const shown = state.pinned ?? state.hovered;
    $("position").hidden = shown === null;
    $("position").classList.toggle("pinned", state.pinned !== null);
    markHere();
    if (shown !== null) paintPosition(shown);
  }

  const overlap = (one, two) => one.left < two.right && two.left < one.right && one.top < two.bottom && two.top < one.bottom;

  // Place a panel under its anchor, above it or beside it, where it is whole on the screen and hides nothing that was opened.
  // On a narrow screen the history of a position is a sheet at the bottom.
  function place(panel, anchor) {
    if (!anchor?.isConnected) return;
    if (getComputedStyle(panel).position === "fixed") {
      panel.style.left = panel.style.top = "";
      return;
    }
    const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect(), gap = 6, edge = 8;
    const { offsetWidth: wide, offsetHeight: high } = panel, room = document.documentElement.clientWidth;
    const opened = [$("position"), $("acts")].filter((each) => each && each !== panel && !each.hidden && !each.contains(anchor)
      && (each === $("position") || getComputedStyle(each).position === "fixed")).map((each) => each.getBoundingClientRect());
    const along = Math.max(edge, Math.min(box.left, room - wide - edge));
    const beside = opened.flatMap((each) => [each.right + gap, each.left - gap - wide]);
    const places = [[along, box.bottom + gap], [along, box.top - gap - high], [box.right + gap, box.top], [box.left - gap - wide, box.top],
      ...beside.flatMap((left) => [[left, box.bottom + gap], [left, box.top - gap - high]]),
      ...opened.flatMap((each) => [[along, each.bottom + gap], [along, each.top - gap - high]])];
    const isFree = ([left, top]) => left >= 0 && left + wide <= room && top >= 0 && top + high <= innerHeight
      && ![box, ...opened].some((each) => overlap({ left, top, right: left + wide, bottom: top + high }, each));
    const [left, top] = places.find(isFree) ?? places[0];
    panel.style.left = `${scrollX + left}px`;
    panel.style.top = `${scrollY + top}px`;
  }

  function paintPosition(i) {
    const sides = make("div", "sides");
    state.trajectories.forEach((trajectory, index) => {
      const frame = frameAt(trajectory, state.at);
      if (!frame || i >= trajectory.header.length) return;
      const side = make("div", `side trajectory${index} ${state.views[index].style.classes}`), now = Math.min(state.at, trajectory.frames.length - 1);
      const word = (token) => make("span", "word", JSON.stringify(flatText(trajectory.tokenTexts.get(token) ?? "\ufffd")));
      const summary = make("p", "", `${trajectory.header.name}: `);
      summary.append(word(frame.modelInput[i]), ` ${describe(trajectory, i, now)}`);
      side.append(summary);
      if (now < total(trajectory) - 1 && !(frame.masks[i] & FIXED)) {
        const list = make("ol", "candidates"), k = trajectory.header.candidates;
        for (let c = 0; c < k; c++) {
          const prob = frame.topProbs[i * k + c] / PROB, item = make("li");
          item.style.setProperty("--prob", `${100 * prob}%`);
          item.append(word(frame.topTokens[i * k + c]), make("span", "", prob < 0.002 ? "< 0.2%" : `${(100 * prob).toFixed(1)}%`));
          list.append(item);
        }
        side.append(list);
      }
      const history = make("ol", "history");
      for (let r = 0; r < trajectory.frames.length;) {
        let end = r;
        while (end + 1 < trajectory.frames.length && trajectory.frames[end + 1].modelInput[i] === trajectory.frames[r].modelInput[i]) end++;
        const run = make("li", r <= now && now <= end ? "now" : "", end > r ? `${r + 1}–${end + 1} ` : `${r + 1} `);
        run.append(word(trajectory.frames[r].modelInput[i]));
        for (const name of causes(trajectory, i, r)) run.append(" ", make("i", classOf(trajectory, name), name));
        history.append(run);
        r = end + 1;
      }
      side.append(history);
      sides.append(side);
    });
    const head = make("div", "head"), addButton = (text, act) => {
      const button = Object.assign(make("button", "", text), { type: "button" });
      button.onclick = act;
      head.append(button);
    };
    head.append(make("h2", "", `${positionName(i)}${state.pinned === i ? ", pinned" : ""}: its tokens, call by call`));
    if (state.pinned === i) {
      const { trajectory } = state.views.find((view) => view.spans[i] === state.anchor) ?? state.views[0];
      const word = trajectory.tokenTexts.get(frameAt(trajectory, state.at)?.modelInput[i]) ?? "";
      if (state.onFix && word) {
        addButton(`Fix ${JSON.stringify(flatText(word))} here`, () => { state.onFix(trajectory.header, i, word); inspect(null, true); });
      }
      addButton("Close", () => { const { anchor } = state; inspect(null, true); anchor?.parentNode.focus({ preventScroll: true }); });
    }
    $("position").replaceChildren(head, sides);
    for (const run of document.querySelectorAll(".history .now")) run.parentNode.scrollTop = run.offsetTop - run.parentNode.offsetTop - 30;
    place($("position"), state.anchor);
  }

  // The masks that explain why the token of frame r differs from the one before: the actions of the call before; of masks
  // unknown here, those that it newly set.
  function causes(trajectory, i, r) {
    if (r === 0) return [];
    const before = r > 1 ? trajectory.frames[r - 2].masks[i] : 0;
    return masksIn(trajectory, trajectory.frames[r - 1].masks[i]).filter((name) =>
      STYLED.includes(name) ? ACTIONS.includes(name) : !masksIn(trajectory, before).includes(name));
  }

  function describe(trajectory, i, now) {
    const names = masksIn(trajectory, trajectory.frames[now].masks[i]);
    const since = (name) => {
      const bit = trajectory.header.masks.indexOf(name);
      let first = now;
      while (first > 0 && trajectory.frames[first - 1].masks[i] >> bit & 1) first--;
      if (ACTIONS.includes(name)) return `${name} in call ${Math.min(now + 1, trajectory.header.calls)}`; // the output has the masks of the final step
      return name === "fixed" ? name : `${name} since call ${first + 1}`;
    };
    const clue = clueAt(trajectory, trajectory.frames[now], i);
    return (names.length ? names.map(since).join(", ") : "free") + (clue && `; the clue is ${clue}`);
  }

  // Timeline

  // Two charts: how many positions have the first mask of the samplers' own, and the mean deficit.
  function charts() {
    const own = [...new Set(state.trajectories.flatMap((trajectory) => trajectory.header.masks.slice(1, 2)))].join(" / ");
    const counts = { title: `${own} positions`, value: (frame) => frame.counts[1] ?? 0, top: (trajectory) => trajectory.header.length, text: (v) => v };
    const values = () => state.trajectories.flatMap((trajectory) => trajectory.frames.map((frame) => frame.meanDeficit));
    const deficit = { title: "mean deficit", value: (frame) => frame.meanDeficit, top: () => Math.max(...values()), text: (v) => v.toFixed(3) };
    return own ? [counts, deficit] : [deficit];
  }

  function buildTimeline() {
    $("timeline").replaceChildren(...charts().map((chart) => {
      const figure = make("figure"), caption = make("figcaption");
      const drawing = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "chart", role: "img" });
      state.views.forEach((view) => drawing.append(svg("path", { class: view.style.classes })));
      drawing.append(svg("line", { x1: 0, x2: 0, y1: 0, y2: 40 }));
      const seek = (event) => {
        if (event.type === "pointermove" && !event.buttons) return;
        const box = drawing.getBoundingClientRect();
        go(Math.round((event.clientX - box.left) / box.width * (frames() - 1)));
      };
      drawing.addEventListener("pointerdown", seek);
      drawing.addEventListener("pointermove", seek);
      const axes = make("div", "axes"), up = make("div", "up"), along = make("div", "along");
      up.append(make("span", "most"), make("span", "", "0"));
      along.append(make("span", "", "call 1"), make("span", "", frames() > 1 ? `${frames() - 1}` : ""));
      axes.append(up, drawing, along);
      caption.append(make("span", "", chart.title), make("span", "value"));
      figure.append(caption, axes);
      return figure;
    }));
  }

  function paintTimeline() {
    const figures = $("timeline").children;
    charts().forEach((chart, c) => {
      const drawing = figures[c].querySelector("svg"), n = frames() - 1;
      const ends = [], top = Math.max(1e-9, ...state.trajectories.map(chart.top)); // one scale for all trajectories
      figures[c].querySelector(".most").textContent = chart.text(top);
      state.trajectories.forEach((trajectory, index) => {
        const points = trajectory.frames.map(chart.value).map((v, r) => [v, r]).filter(([v]) => v !== null);
        drawing.children[index].setAttribute("d", points.map(([v, r], k) =>
          `${k ? "L" : "M"}${(r / n * 100).toFixed(2)} ${(38.5 - 37 * v / top).toFixed(2)}`).join(""));
        if (points.length) ends.push(`${trajectory.header.name} ${chart.text(points[points.length - 1][0])}`);
      });
      figures[c].querySelector(".value").textContent = ends.join(" · ");
      drawing.setAttribute("aria-label", `${chart.title} by call; last: ${ends.join(", ")}`);
    });
  }

  // Navigation

  function announce() {
    const parts = state.trajectories.map((trajectory, index) => {
      const frame = frameAt(trajectory, state.at);
      return frame ? `${trajectory.header.name}: ${state.views[index].counted.join(", ")}` : "";
    });
    $("announcer").textContent = `${$("where").textContent}. ${parts.join(". ")}.`;
  }

  function go(r, isAnnounced = true) {
    if (!state.trajectories.length) return;
    const end = Math.max(0, arrived() - 1);
    state.at = Math.min(Math.max(0, r), end);
    state.follow = state.at === end;
    paint();
    if (isAnnounced && !state.timer) announce();
  }

  function pause() {
    clearInterval(state.timer);
    state.timer = null;
    $("play").classList.remove("playing");
    $("play").setAttribute("aria-label", "Play");
  }

  function play() {
    if (state.timer) { pause(); announce(); return; }
    if (!state.trajectories.length) return;
    if (state.at >= arrived() - 1 && !state.live) go(0, false);
    $("play").classList.add("playing");
    $("play").setAttribute("aria-label", "Pause");
    state.timer = setInterval(() => {
      if (state.at >= arrived() - 1) { if (!state.live) { pause(); announce(); } } else go(state.at + 1, false);
    }, Number($("speed").value));
  }

  // Incoming frames

  function extend(parts) {
    for (const part of parts) addFrame(state.trajectories[part.index], fromBase64(part.frame), part.token_texts);
    if (arrived() === 1) { setLetters(); performance.mark("first frame"); }
    paintTimeline();
    if (state.follow && !state.timer) { state.at = arrived() - 1; }
    paint();
  }

  function setLetters() {
    state.trajectories.forEach((trajectory, index) => {
      const texts = [...trajectory.tokenTexts.values()];
      state.views[index].text.classList.toggle("letters", texts.length > 0 && texts.every((text) => [...text].length === 1));
    });
  }

  function end(results) {
    state.live = false;
    results.forEach((result, index) => Object.assign(state.trajectories[index], result));
    finish();
  }

  // The run was stopped: its frames stay, and can be downloaded.
  function halt() {
    if (!state.live) return;
    state.live = false;
    finish();
  }

  function finish() {
    state.trajectories.forEach((trajectory, index) => {
      const view = state.views[index];
      view.asText.disabled = !trajectory.frames.length || (trajectory.text === null && !stopped(trajectory));
      view.asFile.disabled = trajectory.frames.length < 2;
      view.scores.replaceChildren(...scoreLine(trajectory.scores));
      if (trajectory.drawing && !view.drawing) addDrawing(trajectory, view);
    });
    announce();
  }

  // The drawing of an output stands below its text, and is visible with the output alone.
  function addDrawing(trajectory, view) {
    if (!trajectory.drawing.startsWith("data:image/svg+xml;base64,")) return;
    view.drawing = Object.assign(make("img", "drawing"), { src: trajectory.drawing, alt: `Drawing of ${trajectory.text.trim()}` });
    view.drawing.classList.toggle("pending", state.at < total(trajectory) - 1);
    view.text.after(view.drawing);
  }

  // A checker's values first, then the judge's.
  function scoreLine(scores) {
    const { judge, digest, precision, convention, counted, nll, perplexity, entropy, "rep-4": rep, ...checks } = scores;
    const line = Object.entries(checks).filter(([, value]) => Number.isFinite(value)).flatMap(([name, value], i) =>
      [i ? " · " : "", make("b", "", Number.isInteger(value) ? String(value) : value.toFixed(3)), ` ${name}`]);
    if (perplexity === undefined) return line;
    const how = [digest?.slice(0, 12), precision, convention, counted === undefined ? undefined : `${counted} tokens scored`];
    const parts = [...line, line.length ? " · " : "", make("b", "", perplexity.toFixed(1)), ` perplexity under ${judge} (${how.filter(Boolean).join(", ")})`];
    for (const name of ["entropy", "rep-4"]) {
      if (scores[name] !== undefined) parts.push(" · ", make("b", "", scores[name].toFixed(name === "entropy" ? 2 : 3)), ` ${name}`);
    }
    return parts;
  }

  // Show files, unless `isWanted` says no by the time that they are read.
  async function open(files, isWanted = () => true) {
    const trajectories = await Promise.all(files.map(readFile));
    if (!isWanted()) return;
    Object.assign(state, { trajectories, at: 0, live: false, follow: false });
    build();
    setLetters();
    paintTimeline();
    go(0, false);
    finish();
    performance.mark("opened");
  }

  // Tooltips of the elements with data-tip, on hover and on focus.
  function tips() {
    const tip = $("tip");
    let of = null;
    const hide = () => { tip.hidden = true; of?.removeAttribute("aria-describedby"); of = null; };
    const show = (event) => {
      const described = event.target.closest?.("[data-tip]");
      if (!described) return hide();
      tip.textContent = described.dataset.tip;
      tip.hidden = false;
      of?.removeAttribute("aria-describedby");
      of = event.type === "focusin" ? event.target : described.querySelector("input, select") ?? described;
      of.setAttribute("aria-describedby", "tip");
      place(tip, described.querySelector("input, select") ?? described);
    };
    document.addEventListener("pointerover", show);
    document.addEventListener("focusin", show);
    document.addEventListener("focusout", hide);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  }

  // Give every text the height of its tallest frame, so that nothing below moves during playback.
  function fixHeight() {
    const now = state.at, tallest = state.views.map(() => 0);
    for (let r = 0; r < arrived(); r++) {
      go(r, false);
      state.views.forEach((view, index) => { tallest[index] = Math.max(tallest[index], view.text.offsetHeight); });
    }
    state.views.forEach((view, index) => { view.text.style.minHeight = `${tallest[index]}px`; });
    go(now, false);
  }

  function addListeners() {
    $("first").onclick = () => { pause(); go(0); };
    $("last").onclick = () => { pause(); go(Infinity); };
    $("back").onclick = () => { pause(); go(state.at - 1); };
    $("forward").onclick = () => { pause(); go(state.at + 1); };
    $("play").onclick = play;
    $("scrub").oninput = () => { pause(); go(Number($("scrub").value)); };
    $("speed").onchange = () => { if (state.timer) { pause(); play(); } };
    $("show").onchange = () => { state.show = $("show").value; go(state.at); };
    $("colour").onchange = () => {
      state.colour = $("colour").value;
      $("trajectories").classList.remove("confidence", "age", "none");
      $("trajectories").classList.add(state.colour);
      buildLegend();
      go(state.at);
    };
    $("layout").onchange = () => { $("trajectories").classList.toggle("grid", $("layout").value === "grid"); };
    $("trajectories").classList.add(state.colour);
    $("trajectories").addEventListener("scroll", markTab, { passive: true });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") inspect(null, true);
      const tag = event.target.tagName, typing = ["INPUT", "SELECT", "TEXTAREA"].includes(tag);
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (typing && !(event.target === $("scrub") && event.key === " ")) return; // the slider handles its other keys itself
      if (event.key === " " && (tag === "BUTTON" || tag === "SUMMARY")) return;
      const act = {
        ArrowLeft: () => { pause(); go(state.at - 1); }, ArrowRight: () => { pause(); go(state.at + 1); },
        Home: () => { pause(); go(0); }, End: () => { pause(); go(Infinity); }, " ": play,
      }[event.key];
      if (!act || !state.trajectories.length) return;
      event.preventDefault();
      act();
    });
  }

  addListeners();
  tips();
  return { begin, extend, end, halt, open, go, play, fixHeight, state, make, fileOf, data, narrow, stylesOf };
})();
