// The playground: a form, a request, and its events into the viewer; the address always tells the run.
(() => {
  const about = JSON.parse(document.getElementById("data").textContent), limits = about.limits, defaults = about.policy;
  const $ = (id) => document.getElementById(id), make = limpet.make;
  let running = null; // what aborts the run that is under way

  const PRESETS = {
    CRS: { horizon: null }, native: { horizon: 0 }, "top-p .9": { horizon: 0, top_p: 0.9 },
    "horizon 8": { horizon: 8 }, "CRS, late top-p .9": { horizon: null, late_top_p: 0.9 },
  };
  const number = (low, high, step) => ({ type: "number", min: low, max: high, step });
  // Of each knob: its name on the page, what its input takes, and what an empty input stands for.
  const KNOBS = {
    horizon: { name: "Horizon", ...number(0, 1e6, 1), empty: null, hint: "for ever" },
    warmup: { name: "Warmup", ...number(0, 1, "any") },
    budget: { name: "Budget", ...number(0, 1e6, "any") },
    spacing: { name: "Spacing", ...number(0, 1e6, 1) },
    top_p: { name: "Top-p", ...number(0, 1, "any") },
    late_top_p: { name: "Late top-p", ...number(0, 1, "any"), empty: null, hint: "as top-p" },
    endpoint: { name: "Endpoint", options: ["argmax", "ancestral"] },
    values: { name: "Labels hold", options: ["argmax", "second", "nucleus", "refreshed"] },
  };

  // The form

  function labelled(name, input) {
    const label = make("label", "", name);
    label.append(input);
    return label;
  }

  function addArm(name, policy) {
    const box = make("fieldset", `arm${$("policies").children.length % 4}`), row = make("div", "row");
    const named = make("input"), preset = make("select"), knobs = {};
    named.value = name;
    named.maxLength = 80;
    named.required = true;
    for (const key of ["custom", ...Object.keys(PRESETS)]) preset.append(new Option(key, key));
    const inputs = Object.entries(KNOBS).map(([field, knob]) => {
      const input = make(knob.options ? "select" : "input", knob.options ? "" : "narrow");
      if (knob.options) input.append(...knob.options.map((value) => new Option(value, value)));
      else Object.assign(input, { type: "number", min: knob.min, max: knob.max, step: knob.step, placeholder: knob.hint ?? defaults[field] });
      input.onchange = () => { preset.value = "custom"; };
      knobs[field] = input;
      return labelled(knob.name, input);
    });
    const fill = (values) => {
      for (const [field, input] of Object.entries(knobs)) input.value = (field in values ? values[field] : defaults[field]) ?? "";
    };
    preset.onchange = () => {
      if (preset.value === "custom") return;
      fill(PRESETS[preset.value]);
      named.value = preset.value;
    };
    const away = make("button", "quiet", "remove");
    away.type = "button";
    away.onclick = () => { box.remove(); renumber(); };
    const first = make("div", "row"), more = make("details"), rest = make("div", "row");
    first.append(labelled("Sampler", preset), labelled("Name", named), away);
    rest.append(...inputs);
    more.append(make("summary", "", "Every knob"), rest);
    box.append(make("legend"), first, more);
    $("policies").append(box);
    fill(policy);
    const same = (values) => Object.keys(KNOBS).every((f) => (values[f] ?? defaults[f]) === ((f in policy ? policy[f] : defaults[f])) || (f in values && values[f] === policy[f]));
    preset.value = Object.keys(PRESETS).find((key) => same(PRESETS[key])) ?? "custom";
    box.read = () => {
      const chosen = {};
      for (const [field, input] of Object.entries(knobs)) {
        const knob = KNOBS[field], text = input.value.trim();
        const value = knob.options ? text : text === "" ? ("empty" in knob ? knob.empty : defaults[field]) : Number(text);
        if (value !== defaults[field]) chosen[field] = value;
      }
      return [named.value, chosen];
    };
    renumber();
  }

  function renumber() {
    [...$("policies").children].forEach((box, a) => {
      box.className = `arm${a % 4}`;
      box.querySelector("legend").textContent = `Arm ${a + 1}`;
      box.querySelector("button.quiet").hidden = $("policies").children.length === 1;
    });
    $("add").disabled = $("policies").children.length >= limits.arms;
  }

  function addFixed(position = "", text = "") {
    const row = make("div", "row"), at = make("input", "narrow"), words = make("input"), away = make("button", "quiet", "remove");
    Object.assign(at, { type: "number", min: 1, max: limits.length, value: position, required: true });
    Object.assign(words, { type: "text", value: text, required: true });
    away.type = "button";
    away.onclick = () => row.remove();
    const wide = labelled("Words", words);
    wide.className = "wide";
    row.append(labelled("Position", at), wide, away);
    row.read = () => ({ position: Number(at.value) - 1, text: words.value });
    $("fixed").append(row);
  }

  function chooseModel() {
    const model = about.models.find((each) => each.name === $("model").value);
    $("length").value = model.length;
    $("length").disabled = !model.any_length;
    $("prompt").disabled = !model.text;
  }

  // The request, as the form has it; arms hold only what differs from the default policy.
  function read() {
    const model = about.models.find((each) => each.name === $("model").value), nfe = Number($("nfe").value);
    const arms = {};
    for (const box of $("policies").children) {
      const [name, chosen] = box.read();
      let free = name;
      for (let k = 2; free in arms; k++) free = `${name} ${k}`;
      arms[free] = { nfe, ...chosen };
    }
    const ask = { model: model.name, seed: Number($("seed").value), arms };
    if (model.any_length && $("length").value) ask.length = Number($("length").value);
    if ($("prompt").value) ask.prompt = $("prompt").value;
    const fixed = [...$("fixed").children].map((row) => row.read());
    if (fixed.length) ask.fixed = fixed;
    return ask;
  }

  // The address: model, seed, arms and the words given, each under its own name.
  function addressOf(ask) {
    const model = about.models.find((each) => each.name === ask.model), query = new URLSearchParams();
    query.set("model", ask.model);
    query.set("digest", model.digest.slice(0, 12));
    query.set("seed", ask.seed);
    if (ask.length) query.set("length", ask.length);
    if (ask.prompt) query.set("prompt", ask.prompt);
    if (ask.fixed) query.set("fixed", JSON.stringify(ask.fixed));
    query.set("arms", JSON.stringify(ask.arms));
    return `${location.pathname}?${query}`;
  }

  function restore() {
    const query = new URLSearchParams(location.search);
    if (!query.has("arms")) return false;
    try {
      const model = about.models.find((each) => each.name === query.get("model"));
      if (!model) throw new Error(`there is no model ${query.get("model")} here`);
      const arms = JSON.parse(query.get("arms")), fixed = JSON.parse(query.get("fixed") ?? "[]");
      $("model").value = model.name;
      chooseModel();
      $("seed").value = query.get("seed") ?? "";
      if (query.has("length")) $("length").value = query.get("length");
      $("prompt").value = query.get("prompt") ?? "";
      for (const each of fixed) addFixed(Number(each.position) + 1, String(each.text));
      $("fixing").open = fixed.length > 0;
      $("policies").replaceChildren();
      for (const [name, policy] of Object.entries(arms).slice(0, limits.arms)) addArm(name, policy);
      $("nfe").value = Object.values(arms)[0].nfe ?? defaults.nfe;
      if (query.get("digest") && !model.digest.startsWith(query.get("digest"))) {
        say(`This link was made with another version of ${model.name}: its texts will differ.`);
      }
      return true;
    } catch (error) {
      complain(`This link cannot be read: ${error.message}.`);
      if (!$("policies").children.length) firstArms();
      return false;
    }
  }

  // A run

  const say = (text) => { $("status").textContent = text; };
  const complain = (text) => { $("problem").textContent = text; };

  async function run(ask) {
    running?.abort();
    const mine = running = new AbortController();
    complain("");
    $("stop").disabled = false;
    say("Asking …");
    try {
      const answer = await fetch("api/compare", {
        method: "POST", signal: mine.signal, body: JSON.stringify(ask),
        headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      });
      if (!answer.ok) {
        const told = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
        throw new Error(told.error);
      }
      history.replaceState(null, "", addressOf(ask));
      $("link").disabled = false;
      let ended = false;
      for await (const [kind, data] of events(answer.body)) {
        if (kind === "queued") say(data.ahead === 1 ? "Waiting: one run is before this one." : `Waiting: ${data.ahead} runs are before this one.`);
        if (kind === "begin") {
          limpet.begin(data.arms);
          if ($("viewer").getBoundingClientRect().top > innerHeight * 0.7) $("viewer").scrollIntoView();
        }
        if (kind === "step") { limpet.step(data.arms); say(""); }
        if (kind === "end") { limpet.end(data.arms); ended = true; say("Done."); }
        if (kind === "error") throw new Error(data.error);
      }
      if (!ended) throw new Error("the server broke off");
    } catch (error) {
      limpet.halt();
      if (running === mine) {
        say(mine.signal.aborted ? "Stopped." : "");
        if (!mine.signal.aborted) complain(`${error.message.charAt(0).toUpperCase()}${error.message.slice(1)}.`.replace(/\.\.$/, "."));
      }
    } finally {
      if (running === mine) { running = null; $("stop").disabled = true; }
    }
  }

  // Server-sent events of a body, as [kind, data].
  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const lines = text.slice(0, end).split("\n");
        const kind = lines.find((line) => line.startsWith("event: ")), data = lines.find((line) => line.startsWith("data: "));
        if (kind && data) yield [kind.slice(7), JSON.parse(data.slice(6))];
      }
    }
  }

  function firstArms() {
    addArm("native", PRESETS.native);
    addArm("CRS", PRESETS.CRS);
  }

  for (const model of about.models) $("model").append(new Option(model.name, model.name));
  $("nfe").max = limits.steps;
  $("length").max = limits.length;
  $("seed").max = limits.seed;
  $("model").onchange = chooseModel;
  $("reseed").onclick = () => { $("seed").value = Math.floor(Math.random() * 1e6); };
  $("fix").onclick = () => addFixed();
  $("add").onclick = () => addArm("top-p .9", PRESETS["top-p .9"]);
  $("stop").onclick = () => running?.abort();
  $("link").onclick = async () => {
    try { await navigator.clipboard.writeText(location.href); say("The link is copied."); } catch { say("The link is in the address bar."); }
  };
  $("form").onsubmit = (event) => { event.preventDefault(); run(read()); };
  chooseModel();
  if (restore()) run(read());
  else if (!$("policies").children.length) firstArms();
})();
