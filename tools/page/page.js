// The page, in the order of its sections: state and address, choose, gain, take, see.
// DATA comes from data.js, which tools/site.py makes.
"use strict";

const START = ["amp", "channels_last"]; // the choice of an address that names none
const NEAR = 3; // lines that stay visible around a change when the others are folded

const $ = (id) => document.getElementById(id);

/** Return a new element with these properties and children. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ------------------------------------------------------------------------ joining and comparing
/** Return the rows of a baseline joined with techniques: [{text, key, name, line}].
 *  Equal keys in two scripts are the same line of the same origin; `name` is its technique. */
function join(family, techniques) {
  const { base, variants } = DATA.families[family];
  const changes = techniques.flatMap((name) =>
    variants[name].hunks.map(([start, end, lines]) => ({ name, start, end, lines })));
  changes.sort((a, b) => a.start - b.start || a.end - b.end);
  const rows = [];
  let at = 0;
  const add = (text, key, name) => rows.push({ text, key, name, line: rows.length + 1 });
  const keep = (end) => { for (; at < end; at++) add(base[at], `${at}`, ""); };
  for (const { name, start, end, lines } of changes) {
    keep(start);
    lines.forEach((text, i) => add(text, `${name} ${start} ${i}`, name));
    at = end;
  }
  keep(base.length);
  return rows;
}

const textOf = (rows) => rows.map((row) => row.text).join("\n");

/** Return the rows of both scripts in order; `sign` is "-" in the old only, "+" in the new only. */
function diff(old, now) {
  const inOld = new Set(old.map((row) => row.key)), inNow = new Set(now.map((row) => row.key));
  const rows = [];
  for (let i = 0, j = 0; i < old.length || j < now.length;) {
    if (i < old.length && !inNow.has(old[i].key)) rows.push({ ...old[i++], sign: "-" });
    else if (j < now.length && !inOld.has(now[j].key)) rows.push({ ...now[j++], sign: "+" });
    else { rows.push({ ...now[j++], sign: "" }); i++; }
  }
  return rows;
}

/** Add to each row its HTML and, if it is in a marked block, `block`: {name, reason, line}. */
function describe(rows) {
  const html = highlight(textOf(rows));
  let block = null;
  rows.forEach((row, i) => {
    if (/^\s*(# )?# new #$/.test(row.text)) {
      block = { name: row.name, line: row.line, reason: rows[i + 1].text.replace(/^[\s#]+/, "") };
    } else if (!row.text.replace(/^#$/, "").trim()) {
      block = null;
    }
    Object.assign(row, { html: html[i], block });
  });
  return rows;
}

const TOKEN = new RegExp([
  /(?<string>[rfb]*(?:"""[^]*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))/,
  /(?<comment>#.*)/,
  /\b(?<word>and|as|assert|break|class|continue|def|del|elif|else|except|finally|for)\b/,
  /\b(?<word2>from|global|if|import|in|is|lambda|not|or|pass|raise|return|try|while|with|yield)\b/,
  /\b(?<constant>None|True|False|\d[\w.]*)\b/,
  /(?<=\b(?:def|class) )(?<name>\w+)/,
].map((part) => part.source).join("|"), "g");

/** Return the lines of Python code as HTML with highlighted tokens. */
function highlight(text) {
  const escape = (part) => part.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  let html = "", at = 0;
  for (const found of text.matchAll(TOKEN)) {
    const [kind] = Object.entries(found.groups).find(([, value]) => value !== undefined);
    const tagged = found[0].split("\n") // each line has tags of its own
      .map((line) => `<span class="${kind.replace("2", "")}">${escape(line)}</span>`).join("\n");
    html += escape(text.slice(at, found.index)) + tagged;
    at = found.index + found[0].length;
  }
  return (html + escape(text.slice(at))).split("\n");
}

// ------------------------------------------------------------------------ state and address
const state = {};

/** Return those of `names` that exist, sorted; of some that exclude each other only the first. */
function allowed(family, names) {
  return DATA.families[family].choices
    .flatMap((choice) => choice.filter((name) => names.includes(name)).slice(0, 1)).sort();
}

/** Set the state to what an address says: #train=DDP,amp&from=DALI&view=diff&at=FOLDER. */
function readAddress(address) {
  const words = new URLSearchParams(address.slice(1));
  const list = (name) => (words.get(name) ?? "").split(",");
  const family = words.has("loader") ? "loader" : "train";
  const records = DATA.records.filter((record) => record.family === family);
  Object.assign(state, {
    family,
    chosen: allowed(family, words.has(family) ? list(family) : family === "train" ? START : []),
    from: allowed(family, list("from")),
    view: words.get("view") === "diff" ? "diff" : "script",
    record: records.find((record) => record.folder === words.get("at")) ?? records[0],
    fold: true,
  });
}

function writeAddress() {
  const words = [`${state.family}=${state.chosen.join(",")}`];
  if (state.from.length) words.push(`from=${state.from.join(",")}`);
  if (state.view === "diff") words.push("view=diff");
  if (state.record) words.push(`at=${state.record.folder}`);
  history.replaceState(null, "", `#${words.join("&")}`);
}

/** Change the state and show it. */
function change(changes) {
  Object.assign(state, changes);
  writeAddress();
  show();
}

// ------------------------------------------------------------------------ choose
/** Set the switches as the answers suggest, and say why with the sentences of the guide. */
function advise() {
  const named = (key) => [...$("questions").querySelectorAll("option:checked")]
    .flatMap((answer) => answer.dataset[key]?.split(" ") ?? []);
  const leave = named("leave"), take = without(named("take"), leave);
  const { variants } = DATA.families.train;
  const reason = (word, name, text) => make("li", {}, word,
    make("a", { href: variants[name].guide }, name), `: ${text}`);
  $("reasons").replaceChildren(
    ...take.map((name) => reason("", name, variants[name].pays)),
    ...leave.map((name) => reason("not ", name, variants[name].pays_not)));
  change({ chosen: allowed("train", take) });
}

function buildSwitches() {
  const { choices, variants } = DATA.families[state.family];
  const input = (type, name, value) =>
    make("input", { type, name, value, checked: state.chosen.includes(value) });
  const label = (control, name) => make("label", { className: "switch", style: hueOf(name) },
    control, make("span", {}, make("b", {}, name), make("small", {},
      `${variants[name].title}, +${variants[name].added} lines`)));
  const groups = new Map();
  choices.forEach((choice, i) => {
    const { group } = variants[choice[0]];
    if (!groups.has(group)) {
      const title = group + (choice.length > 1 ? ": one of these" : "");
      groups.set(group, make("fieldset", {}, make("legend", {}, title)));
    }
    if (choice.length > 1) {
      const none = input("radio", `choice${i}`, "");
      none.checked = !choice.some((name) => state.chosen.includes(name));
      // beside other techniques of its group, "none" would not say of what
      const alone = choices.filter(([name]) => variants[name].group === group).length === 1;
      groups.get(group).append(make("label", { className: "switch" }, none,
        make("b", {}, alone ? "none" : choice.map((name) => `no ${name}`).join(", "))));
    }
    const type = choice.length > 1 ? "radio" : "checkbox";
    groups.get(group).append(...choice.map((name) => label(input(type, `choice${i}`, name), name)));
  });
  $("switches").replaceChildren(...groups.values());
  $("switches").dataset.family = state.family;
}

function showSwitches() {
  if ($("switches").dataset.family !== state.family) buildSwitches();
  for (const input of $("switches").querySelectorAll("input")) {
    const group = DATA.families[state.family].choices[input.name.replace("choice", "")];
    input.checked = input.value ? state.chosen.includes(input.value)
      : !group.some((name) => state.chosen.includes(name));
  }
  for (const name of ["family", "view"]) {
    for (const input of $(name).querySelectorAll("input")) {
      input.checked = input.value === state[name];
    }
  }
  $("advice").hidden = state.family !== "train";
  $("clear").disabled = !state.chosen.length;
}

/** Return the style that gives a technique its colour. */
function hueOf(name) {
  const names = Object.keys(DATA.families[state.family].variants);
  return name ? `--hue: ${Math.round((names.indexOf(name) * 360) / names.length)}` : "";
}

// ------------------------------------------------------------------------ gain
const called = (techniques) => techniques.join(" + ") || "baseline";
const without = (one, other) => one.filter((name) => !other.includes(name));
const figure = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 0 });

/** Return [[row of the record, why it is shown]] for the choice, in the order of the bars. */
function comparison() {
  const { rows } = state.record, { chosen } = state;
  const good = rows.filter((row) => row.speed);
  const distance = (row) =>
    without(row.techniques, chosen).length + without(chosen, row.techniques).length;
  const reasons = new Map();
  const add = (row, reason) => reasons.set(row, [...(reasons.get(row) ?? []), reason]);
  rows.filter((row) => !row.techniques.length).forEach((row) => add(row, ""));
  rows.filter((row) => distance(row) === 0).forEach((row) => add(row, "your choice"));
  if (!good.some((row) => distance(row) === 0)) {
    const others = good.filter((row) => row.techniques.length);
    const least = Math.min(...others.map(distance));
    for (const row of others.filter((each) => distance(each) === least)) {
      const more = without(row.techniques, chosen), less = without(chosen, row.techniques);
      add(row, ["nearest:", more.length ? `with ${more.join(", ")}` : "",
        less.length ? `without ${less.join(", ")}` : ""].filter(Boolean).join(" "));
    }
  }
  const fastest = good.reduce((one, other) => (other.speed > one.speed ? other : one), good[0]);
  if (fastest) add(fastest, "the fastest measured here");
  return [...reasons].map(([row, why]) => [row, why.filter(Boolean)]);
}

/** Return the bar and figures of a row of the record. */
function bar(row, reasons) {
  const { rows } = state.record;
  const kind = reasons.includes("your choice") ? "mine" : row.techniques.length ? "other" : "base";
  const name = called(row.techniques) + (row.note ? `, ${row.note}` : "");
  const item = make("li", { className: `bar ${kind}` },
    make("p", {}, make("b", {}, name), make("small", {}, ` ${reasons.join(", ")}`)));
  if (!row.speed) {
    item.append(make("p", { className: "figures" }, `no figure: ${row.problem}`));
    return item;
  }
  const most = Math.max(...rows.map((each) => each.most ?? 0));
  const percent = (value) => `${(100 * value) / most}%`;
  const fill = make("i"), range = make("i", { className: "range" });
  fill.style.width = percent(row.speed);
  Object.assign(range.style, { left: percent(row.least), width: percent(row.most - row.least) });
  const track = make("div", { className: "track", ariaHidden: "true" }, fill, range);
  const base = rows.find((each) =>
    each.speed && !each.techniques.length && each.note === row.note);
  const ratio = row.ratio ?? (base ? `${(row.speed / base.speed).toFixed(2)}x` : "");
  const many = (count, name) => `${count} ${name}${count > 1 ? "s" : ""}`;
  item.append(track, make("p", { className: "figures" },
    make("b", {}, `${figure(row.speed)} images/s`), ` ${ratio} `, make("b", {}, row.value),
    make("small", {}, ` ${figure(row.least)} to ${figure(row.most)}; ${many(row.runs, "run")}, `
      + many(row.epochs, "epoch"))));
  return item;
}

function showGain() {
  const records = DATA.records.filter((record) => record.family === state.family);
  $("record").replaceChildren(...records.map((record) => make("option",
    { value: record.folder, selected: record === state.record }, record.title)));
  $("record").parentNode.hidden = !records.length;
  if (!state.record) {
    $("found").textContent = "No table of this kind has been recorded yet.";
    $("gain").replaceChildren(make("p", {}, "To measure on your machine: ",
      make("code", {}, state.family === "train" ? "./running.sh 5 DATASET"
        : "./loading.sh loader_DALI.py DATASET")));
    return;
  }
  const { record, tables, warning, setting, limits } = state.record;
  const shown = comparison();
  const mine = shown.find(([, reasons]) => reasons.includes("your choice"));
  $("found").textContent = mine?.[0].speed ? "Your choice was measured with this workload."
    : `Your choice, ${called(state.chosen)}, was not measured with this workload. `
      + "Below are the nearest sets that were.";
  const link = (href, text) => make("a", { href }, text);
  $("gain").replaceChildren(
    ...(warning ? [make("p", { className: "warning" }, warning)] : []),
    make("ol", { className: "bars" }, ...shown.map(([row, reasons]) => bar(row, reasons))),
    ...limits.map((text) => make("p", {}, text)),
    make("p", {}, "Bars: median of the epochs after the first; the thin line: slowest to fastest ",
      "epoch. ", link(record, "The record"), " and ", link(tables, "its tables"), "."),
    make("details", {}, make("summary", {}, "Machine, versions and command"),
      make("p", {}, setting)));
}

// ------------------------------------------------------------------------ take
const fileName = () => (state.family === "train" ? "my_train.py" : "my_loader.py");

/** Return what to type: {what it does: command}. */
function commands(text) {
  const { family, chosen } = state, { variants } = DATA.families[family];
  const needed = [...text.match(/dependencies = \[([^]*?)# \]/)[1].matchAll(/"(.*?)"/g)]
    .map(([, name]) => (/^[\w-]+$/.test(name) ? name : `"${name}"`));
  const launchers = chosen.map((name) => variants[name].launcher);
  const launcher = launchers.find((each) => !each.startsWith("python ")) ?? "python ";
  const isJoined = family === "train" && chosen.length;
  return {
    "The same file from a clone": isJoined ? `./compose.sh ${chosen.join(" ")} > ${fileName()}`
      : `cp src/${[family, ...chosen].join("_")}.py ${fileName()}`,
    ...(isJoined && { "Into your edited copy": `./compose.sh --into mine.py ${chosen.join(" ")}` }),
    "What it needs": `pip install ${needed.join(" ")}`,
    "Run it": `${launcher}${fileName()} `
      + (family === "train" ? "--dataset DATASET --model resnet50 --image_size 224"
        : "--dataset DATASET"),
  };
}

function showTake(text) {
  $("download").textContent = `Download ${fileName()}`;
  $("commands").replaceChildren(...Object.entries(commands(text)).flatMap(([what, command]) => {
    const button = make("button", { type: "button", ariaLabel: `Copy: ${what}` }, "Copy");
    button.onclick = () => copy(command);
    return [make("dt", {}, what), make("dd", {}, unbroken(command), button)];
  }));
}

/** Return a command as code that breaks between its words only. */
function unbroken(command) {
  return make("code", {}, ...command.split(" ")
    .flatMap((word, i) => [i ? " " : "", make("span", {}, word)]));
}

/** Copy a text and say so; pages without https have no navigator.clipboard. */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("done").textContent = "Copied";
}

function download() {
  const url = URL.createObjectURL(new Blob([textOf(join(state.family, state.chosen))]));
  make("a", { href: url, download: fileName() }).click();
  URL.revokeObjectURL(url);
  $("done").textContent = "Downloaded";
}

// ------------------------------------------------------------------------ see
function showFrom() {
  const sets = [[], ...(state.from.length ? [state.from] : [])];
  $("from").replaceChildren(...sets.map((set) => make("option",
    { value: set.join(","), selected: set === sets.at(-1) },
    set.length ? called(set) : `the baseline, ${state.family}.py`)));
  $("from-field").hidden = state.view !== "diff";
}

function rowElement(row, index) {
  const tag = row.sign === "+" ? "ins" : row.sign === "-" ? "del" : "div";
  const element = make(tag, { className: row.block ? "row new" : "row", id: `row${index}`,
    style: hueOf(row.block?.name), innerHTML: `<code>${row.html || " "}</code>` });
  element.dataset.line = `${row.line}${row.sign ? ` ${row.sign}` : ""}`;
  if (row.block?.line === row.line) {
    element.append(make("span", { className: "tag" }, row.block.name));
  }
  return element;
}

/** Return the elements of the rows; a button stands for a long run of unchanged ones. */
function codeElements(rows, isChanged) {
  const near = rows.map((_, i) => rows.slice(Math.max(0, i - NEAR), i + NEAR + 1).some(isChanged));
  const elements = [];
  for (let i = 0; i < rows.length;) {
    let end = i + 1;
    while (end < rows.length && near[end] === near[i]) end++;
    const start = i;
    const run = () => rows.slice(start, end).map((row, k) => rowElement(row, start + k));
    if (near[i] || end - i <= NEAR || !state.fold || !near.includes(true)) {
      elements.push(...run());
    } else {
      const button = make("button", { type: "button", className: "fold" },
        `Show ${end - i} unchanged lines`);
      button.onclick = () => {
        button.replaceWith(...run());
        $("code").focus({ preventScroll: true });
      };
      elements.push(button);
    }
    i = end;
  }
  return elements;
}

function showCode(now) {
  const isDiff = state.view === "diff";
  const rows = isDiff ? diff(describe(join(state.family, state.from)), now) : now;
  if (rows.at(-1).text === "") rows.pop(); // what follows the last line's end
  $("code").replaceChildren(...codeElements(rows, (row) => (isDiff ? row.sign : row.block)));
  const starts = rows.map((row, index) => ({ ...row, index }))
    .filter((row) => row.block?.line === row.line && (!isDiff || row.sign));
  $("blocks").replaceChildren(...starts.map(({ block, index, sign }) => {
    const button = make("button", { type: "button", style: hueOf(block.name) },
      make("b", {}, `${sign === "-" ? "without " : ""}${block.name}`), ` line ${block.line}`,
      make("span", {}, block.reason));
    button.dataset.row = index;
    button.onclick = () => jump(index);
    return make("li", {}, button);
  }));
  const plus = rows.filter((row) => row.sign === "+").length;
  const minus = rows.filter((row) => row.sign === "-").length;
  $("summary").textContent = isDiff
    ? `${called(state.from)} to ${called(state.chosen)}: ${plus} lines added, ${minus} removed.`
    : `${called(state.chosen)}: ${rows.length} lines, ${starts.length} marked blocks.`;
  $("fold").checked = state.fold;
  $("code").scrollTop = 0;
  markCurrent();
}

function jump(index) {
  const row = $(`row${index}`);
  $("code").scrollTop = row.offsetTop - 40;
  $("code").focus({ preventScroll: true });
  $("code").scrollIntoView({ block: "nearest" });
}

/** Mark the block that the reader of the code is at. */
function markCurrent() {
  const buttons = [...$("blocks").querySelectorAll("button")];
  const isAbove = (button) => $(`row${button.dataset.row}`).offsetTop < $("code").scrollTop + 60;
  const current = buttons.findLast(isAbove) ?? buttons[0];
  for (const button of buttons) button.ariaCurrent = button === current ? "true" : null;
  if (!current) return;
  const list = $("blocks");
  if (current.offsetTop < list.scrollTop
      || current.offsetTop + current.offsetHeight > list.scrollTop + list.clientHeight) {
    list.scrollTop = current.offsetTop - 8;
  }
}

// ------------------------------------------------------------------------ start
function show() {
  const rows = describe(join(state.family, state.chosen));
  showSwitches();
  showGain();
  showTake(textOf(rows));
  showFrom();
  showCode(rows);
}

readAddress(location.hash);
show();

addEventListener("hashchange", () => {
  if (location.hash === "#scripts") return;
  readAddress(location.hash);
  show();
});
$("choose").onsubmit = (event) => event.preventDefault();
$("questions").onchange = advise;
$("switches").onchange = () => change({ chosen: [...$("switches").querySelectorAll("input:checked")]
  .map((input) => input.value).filter(Boolean).sort() });
$("clear").onclick = () => change({ chosen: [] });
$("family").onchange = (event) => {
  readAddress(event.target.value === "loader" ? "#loader=" : "");
  change({});
};
$("view").onchange = (event) => change({ view: event.target.value });
$("record").onchange = (event) => change(
  { record: DATA.records.find((record) => record.folder === event.target.value) });
$("from").onchange = (event) => change(
  { from: allowed(state.family, event.target.value.split(",")) });
$("pin").onclick = () => change({ from: state.chosen, view: "diff" });
$("fold").onchange = (event) => change({ fold: event.target.checked });
$("download").onclick = download;
$("copy-script").onclick = () => copy(textOf(join(state.family, state.chosen)));
$("copy-link").onclick = () => { writeAddress(); copy(location.href); };
$("code").onscroll = markCurrent;
