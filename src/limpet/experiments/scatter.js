// A scatter to be looked into: one panel at a time, families shown or hidden, any dots' texts side by side.
// It stands in place of the still figure. Text enters as text only: no string is parsed as HTML.
"use strict";
(() => {
  const MOST = 3; // texts side by side
  const NEAR = 26; // pixels within which a pointer means a dot
  const SHAPES = [
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0", "M-4-4H4V4H-4z", "M0-5.4L5 3.6H-5z", "M0-5.6L5.6 0L0 5.6L-5.6 0z",
  ];
  const data = JSON.parse(document.getElementById("scatters").textContent);

  function make(tag, fields = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(fields)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function draw(tag, fields, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(fields)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // Of every dot its cell and its texts: deflated, in base64.
  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }
  let unpacked = null;
  const texts = () => (unpacked ??= unpack(data.texts));
  let dots = 0; // so far, in all panels of all scatters: where a dot's texts stand

  const numeral = (value, error) =>
    value === null ? "no value" : value.toFixed(3) + (error === null ? "" : ` ± ${error.toFixed(3)}`);

  // Round numbers between two: about `count` of them.
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push([i * step, (i * step).toFixed(digits)]);
    return found;
  }

  // The ends of an axis: all values and their errors, and some air.
  function ends(pairs) {
    const low = Math.min(...pairs.map(([v, e]) => v - e)), high = Math.max(...pairs.map(([v, e]) => v + e));
    const air = (high - low || 1) * 0.05;
    return [low - air, high + air];
  }

  function open(scatter) {
    const families = [...new Set(scatter.arms.map(([, family]) => family))];
    const panels = scatter.panels.map(({ title, dots: own }) => ({
      title,
      dots: own.map(([i, x, xError, y, yError]) => {
        const [arm, family] = scatter.arms[i];
        return { key: dots++, arm, family, title, x, xError, y, yError };
      }),
    }));
    const look = (family) => {
      const i = families.indexOf(family), own = scatter.colours[i];
      const before = scatter.colours.slice(0, i).filter((colour) => colour === own).length; // shapes tell them apart
      return { class: `is-${own}`, d: SHAPES[before % SHAPES.length] };
    };
    const numbers = (dot) =>
      [`${scatter.x}: ${numeral(dot.x, dot.xError)}`, `${scatter.y}: ${numeral(dot.y, dot.yError)}`];
    const hidden = new Set();
    let panel = panels[0], chosen = [], current = null, placed = [];

    const place = document.getElementById(`scatter-${scatter.name}`).parentElement;
    const select = make("select", { onchange: () => turn(select.selectedIndex) },
      ...panels.map(({ title }) => make("option", {}, title)));
    const step = (by, name, sign) => {
      const onclick = () => turn((panels.indexOf(panel) + by + panels.length) % panels.length);
      return make("button", { type: "button", "aria-label": name, onclick }, sign);
    };
    const legend = make("div", { class: "legend", role: "group", "aria-label": "Families" });
    const plot = draw("svg", { role: "group", "aria-label": scatter.caption });
    const popover = make("div", { class: "popover", "aria-hidden": "true", hidden: "" });
    const wrapper = make("div", { class: "plot" }, plot, popover);
    const told = make("p", { class: "told", role: "status" });
    const below = make("div", { class: "texts" });
    const section = make("section", { class: "scatter", "aria-label": scatter.caption },
      make("p", { class: "choose" },
        make("label", {}, "Panel ", select), step(-1, "Panel before", "‹"), step(1, "Next panel", "›")),
      wrapper, legend,
      make("p", { class: "told" }, `${scatter.caption} Arrow keys go from dot to dot; a click or Enter puts its texts `
        + `below, those of up to ${MOST} side by side.`),
      told, below);
    place.before(section);
    place.hidden = true; // the still figure

    function turn(i) {
      panel = panels[i];
      select.selectedIndex = i;
      render();
    }

    // Families

    function toggles() {
      const all = (show) => {
        families.forEach((family) => (show ? hidden.delete(family) : hidden.add(family)));
        toggles();
        render();
      };
      legend.replaceChildren(
        ...families.map((family) => {
          const { class: colour, d } = look(family);
          const marker = draw("svg", { viewBox: "-7 -7 14 14", class: colour, "aria-hidden": "true" },
            draw("path", { d }));
          const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(family)) },
            marker, family);
          button.addEventListener("click", () => {
            if (!hidden.delete(family)) hidden.add(family);
            button.setAttribute("aria-pressed", String(!hidden.has(family)));
            render();
          });
          return button;
        }),
        make("button", { type: "button", onclick: () => all(true) }, "all"),
        make("button", { type: "button", onclick: () => all(false) }, "none"),
      );
    }

    // The plot

    function render() {
      const shown = panel.dots.filter((dot) => !hidden.has(dot.family) && dot.x !== null && dot.y !== null);
      const width = Math.max(280, wrapper.clientWidth), height = Math.round(Math.min(540, Math.max(320, width * 0.6)));
      const left = 52, right = width - 12, top = 12, bottom = height - 44;
      const [x0, x1] = shown.length ? ends(shown.map((dot) => [dot.x, dot.xError ?? 0])) : [0, 1];
      const [y0, y1] = shown.length ? ends(shown.map((dot) => [dot.y, dot.yError ?? 0])) : [0, 1];
      const across = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
      const up = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const line = (x1, y1, x2, y2, kind) => draw("line", { x1, y1, x2, y2, class: kind });
      const text = (x, y, words, anchor, more = {}) => draw("text", { x, y, "text-anchor": anchor, ...more }, words);
      const axes = draw("g", { "aria-hidden": "true" },
        ...ticks(x0, x1, width / 110).flatMap(([x, words]) =>
          [line(across(x), top, across(x), bottom, "grid"), text(across(x), bottom + 16, words, "middle")]),
        ...ticks(y0, y1, height / 70).flatMap(([y, words]) =>
          [line(left, up(y), right, up(y), "grid"), text(left - 6, up(y) + 4, words, "end")]),
        text((left + right) / 2, height - 8, scatter.x, "middle"),
        text(0, 0, scatter.y, "middle", { transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)` }));
      const curves = draw("g", { "aria-hidden": "true" }, ...scatter.joined.map((family) => {
        const points = shown.filter((dot) => dot.family === family).map((dot) => `${across(dot.x)},${up(dot.y)}`);
        return draw("polyline", { points: points.join(" "), class: `curve ${look(family).class}` });
      }));
      const bars = draw("g", { "aria-hidden": "true" }, ...shown.flatMap((dot) => {
        const x = across(dot.x), y = up(dot.y), kind = `bar ${look(dot.family).class}`;
        return [line(across(dot.x - (dot.xError ?? 0)), y, across(dot.x + (dot.xError ?? 0)), y, kind),
          line(x, up(dot.y - (dot.yError ?? 0)), x, up(dot.y + (dot.yError ?? 0)), kind)];
      }));
      placed = shown.map((dot) => {
        const { class: colour, d } = look(dot.family), x = across(dot.x), y = up(dot.y);
        const mark = draw("path", {
          d, class: `dot ${colour}`, transform: `translate(${x} ${y})`, role: "button", tabindex: "-1",
          "aria-label": [dot.arm, dot.family, ...numbers(dot)].join(", "), "aria-pressed": String(holds(dot)),
        });
        return { dot, x, y, mark };
      }).sort((a, b) => a.x - b.x);
      plot.replaceChildren(axes, curves, bars, draw("g", {}, ...placed.map(({ mark }) => mark)));
      placed[0]?.mark.setAttribute("tabindex", "0"); // the one stop of the Tab key
      hide();
      current = null;
    }

    // The popover

    function point(to) {
      if (current !== to) {
        placed.forEach(({ mark }) => mark.setAttribute("tabindex", mark === to.mark ? "0" : "-1"));
        current?.mark.classList.remove("current");
        current = to;
        to.mark.classList.add("current");
      }
      const { dot } = to;
      popover.replaceChildren(
        make("b", {}, dot.arm), ...[dot.family, ...numbers(dot)].map((words) => make("span", {}, words)));
      popover.hidden = false;
      const scale = plot.clientWidth / plot.viewBox.baseVal.width || 1, x = to.x * scale, y = to.y * scale;
      const most = wrapper.clientWidth - popover.offsetWidth;
      popover.style.left = `${Math.max(0, Math.min(most, x - popover.offsetWidth / 2))}px`;
      popover.style.top = `${y - popover.offsetHeight - 12 < 0 ? y + 14 : y - popover.offsetHeight - 12}px`;
    }

    function hide() {
      popover.hidden = true;
      current?.mark.classList.remove("current");
    }

    function nearest(event) {
      const box = plot.getBoundingClientRect(), scale = box.width / plot.viewBox.baseVal.width || 1;
      const far = ({ x, y }) => Math.hypot(box.left + x * scale - event.clientX, box.top + y * scale - event.clientY);
      const found = placed.reduce((best, one) => (best && far(best) <= far(one) ? best : one), null);
      return found && far(found) <= NEAR ? found : null;
    }

    plot.addEventListener("pointermove", (event) => {
      const found = nearest(event);
      if (found) point(found);
      else if (!plot.contains(document.activeElement)) hide();
    });
    plot.addEventListener("pointerleave", () => plot.contains(document.activeElement) || hide());
    plot.addEventListener("click", (event) => {
      const found = nearest(event);
      if (found) {
        point(found);
        toggle(found.dot);
      }
    });
    // Keys and focus are heard on what is no SVG: a browser may make a stop of the Tab key of one that hears them.
    wrapper.addEventListener("focusin", (event) => {
      const found = placed.find(({ mark }) => mark === event.target);
      if (found && found.mark.matches(":focus-visible")) point(found);
    });
    wrapper.addEventListener("focusout", hide);
    wrapper.addEventListener("keydown", (event) => {
      const at = placed.findIndex(({ mark }) => mark === event.target);
      if (at < 0) return;
      const own = placed.filter(({ dot }) => dot.family === placed[at].dot.family), among = own.indexOf(placed[at]);
      const to = {
        ArrowRight: placed[at + 1], ArrowLeft: placed[at - 1], Home: placed[0], End: placed.at(-1),
        ArrowUp: own[among + 1], ArrowDown: own[among - 1], // along its family
      };
      if (event.key === "Enter" || event.key === " ") toggle(placed[at].dot);
      else if (event.key === "Escape") hide();
      else if (event.key in to) to[event.key]?.mark.focus();
      else return;
      event.preventDefault();
    });

    // The texts

    function holds(dot) {
      return chosen.includes(dot);
    }

    function toggle(dot) {
      const there = holds(dot);
      const left = there ? chosen.filter((one) => one !== dot) : [...chosen, dot];
      const gone = left.slice(0, -MOST);
      told.textContent = gone.length
        ? `${dot.arm} takes the place of ${gone[0].arm}.`
        : `Texts of ${dot.arm} ${there ? "removed" : "shown below"}.`;
      chosen = left.slice(-MOST);
      for (const { dot: one, mark } of placed) mark.setAttribute("aria-pressed", String(holds(one)));
      return show();
    }

    async function show() {
      let known = [], trouble = "No text of this arm is kept.";
      try {
        known = await texts();
      } catch {
        trouble = "This browser cannot unpack the texts: a newer one can.";
      }
      below.replaceChildren(...chosen.map((dot) => {
        const samples = known[dot.key]?.slice(1) ?? [], name = `${dot.arm}, ${dot.title}`, onclick = () => toggle(dot);
        return make("article", { "aria-label": name },
          make("header", {},
            make("h3", { class: look(dot.family).class }, dot.arm),
            make("button", { type: "button", "aria-label": `Remove ${name}`, onclick }, "remove"),
            make("p", {}, [dot.title, dot.family, ...numbers(dot)].join(" · "))),
          ...samples.map((sample) => make("p", { class: "sample" }, sample)),
          ...(samples.length ? [] : [make("p", {}, trouble)]));
      }));
    }

    toggles();
    render();
    let wide = wrapper.clientWidth;
    new ResizeObserver(() => {
      if (wrapper.clientWidth !== wide) {
        wide = wrapper.clientWidth;
        render();
      }
    }).observe(wrapper);
  }

  data.scatters.forEach(open);
})();
