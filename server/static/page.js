// One page: send the prompt, read the event stream, show text and rounds. No framework, no outside requests.

const $ = (id) => document.getElementById(id);
const view = { rounds: [], shown: -1, follow: true, model: null, running: null };

async function loadModel() {
  const answer = await fetch("/v1/models", { headers: authorization() });
  if (answer.status === 401) return askForKey();
  if (!answer.ok) {
    $("model").textContent = "the model is being loaded";
    setTimeout(loadModel, 1000);
    return;
  }
  view.model = (await answer.json()).data[0];
  const drafter = view.model.drafter ? "with drafter" : "without drafter";
  $("model").textContent = `${view.model.id}, context ${view.model.context_len}, ${drafter}`;
}

function authorization() {
  return $("key").value ? { authorization: `Bearer ${$("key").value}` } : {};
}

function askForKey() {
  $("key-row").hidden = false;
  $("model").textContent = "this server asks for a key";
}

function requestBody() {
  const form = new FormData($("form"));
  const body = {
    model: view.model?.id,
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    speculation: { mode: form.get("mode") },
    stream: true,
    canopy: true,
  };
  if ($("budget").value !== "") body.speculation.budget = Number($("budget").value);
  const prompt = $("prompt").value;
  const chat = form.get("kind") === "chat";
  if (chat) body.messages = [{ role: "user", content: prompt }];
  else body.prompt = prompt;
  return [chat ? "/v1/chat/completions" : "/v1/completions", body];
}

async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length > 0) yield data.join("\n");
    }
  }
}

async function run(event) {
  event.preventDefault();
  if (view.running) return;
  view.running = new AbortController();
  reset();
  const started = performance.now();
  try {
    const [path, body] = requestBody();
    const answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...authorization() },
      body: JSON.stringify(body),
      signal: view.running.signal,
    });
    if (answer.status === 401) askForKey();
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    await show(answer.body, started);
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
    else $("said").textContent = "Stopped.";
  } finally {
    view.running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

async function show(stream, started) {
  const counts = { tokens: 0, rounds: 0, gained: 0, first: 0 };
  for await (const data of serverEvents(stream)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const canopy = chunk.canopy;
    if (canopy?.tokens) {
      appendTokens(canopy.tokens);
      counts.tokens += canopy.tokens.length;
      if (counts.first === 0) counts.first = performance.now();
      if (canopy.round) {
        counts.rounds += 1;
        counts.gained += canopy.round.path.length;
        addRound(canopy.round);
      }
      liveStats(counts);
    } else if (canopy) {
      finalStats(canopy, chunk.choices[0]?.finish_reason, performance.now() - started);
    }
  }
}

function reset() {
  $("run").disabled = true;
  $("stop").disabled = false;
  $("problem").hidden = true;
  $("said").textContent = "";
  view.rounds = [];
  view.shown = -1;
  view.follow = true;
  $("tree").replaceChildren();
  showRound();
  for (const id of ["acceptance", "speed", "rounds", "tokens"]) $(id).textContent = "–";
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  const chat = new FormData($("form")).get("kind") === "chat";
  prompt.textContent = chat ? "" : $("prompt").value;
  $("text").replaceChildren(prompt);
}

function problem(message) {
  $("problem").textContent = message;
  $("problem").hidden = false;
}

function appendTokens(tokens) {
  const box = $("text");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  for (const token of tokens) {
    const span = document.createElement("span");
    span.className = `token ${token.origin}`;
    span.textContent = token.text;
    box.append(span);
  }
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function liveStats(counts) {
  $("tokens").textContent = counts.tokens;
  $("rounds").textContent = counts.rounds;
  if (counts.rounds > 0) $("acceptance").textContent = (counts.gained / counts.rounds).toFixed(2);
  const seconds = (performance.now() - counts.first) / 1000;
  if (seconds > 0.05) $("speed").textContent = ((counts.tokens - 1) / seconds).toFixed(0);
}

function finalStats(stats, reason, milliseconds) {
  $("acceptance").textContent = stats.acceptance_length.toFixed(2);
  $("speed").textContent = stats.tokens_per_second.toFixed(0);
  $("rounds").textContent = stats.rounds;
  const tokens = stats.drafted_tokens + stats.bonus_tokens;
  $("said").textContent = `Done (${reason}): ${tokens} tokens in ${(milliseconds / 1000).toFixed(1)} seconds.`;
}

function addRound(round) {
  view.rounds.push(round);
  if (!view.follow) return pager();
  view.shown = view.rounds.length - 1;
  if (!view.frame) {
    view.frame = requestAnimationFrame(() => {
      view.frame = 0;
      showRound();
    });
  }
}

function turn(by) {
  view.shown = Math.min(Math.max(view.shown + by, 0), view.rounds.length - 1);
  view.follow = view.shown === view.rounds.length - 1;
  showRound();
}

function pager() {
  const count = view.rounds.length;
  $("which").textContent = count === 0 ? "no round" : `round ${view.shown + 1} of ${count}`;
  $("previous").disabled = view.shown <= 0;
  $("next").disabled = view.shown >= count - 1;
}

function showRound() {
  pager();
  const round = view.rounds[view.shown];
  if (round) $("tree").replaceChildren(drawTree(round));
}

// Leaves take rows top to bottom, a parent stands at its first child's row, depth runs to the right.
function layout(nodes) {
  const children = nodes.map(() => []);
  const depth = nodes.map(() => 0);
  nodes.forEach((node, at) => {
    if (node.parent < 0) return;
    children[node.parent].push(at);
    depth[at] = depth[node.parent] + 1;
  });
  const row = nodes.map(() => 0);
  let rows = 0;
  const place = (at) => {
    row[at] = rows;
    children[at].forEach((child, nth) => {
      if (nth > 0) rows += 1;
      place(child);
    });
  };
  if (nodes.length > 0) place(0);
  return { depth, row, rows: rows + 1 };
}

const CELL = { width: 104, height: 44, boxWidth: 82, boxHeight: 24, left: 6, top: 6 };

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function drawTree(round) {
  const accepted = new Set(round.path);
  const last = round.path[round.path.length - 1];
  const nodes = round.nodes.concat({ text: round.bonus.text, parent: last, prob: null });
  const order = acceptedFirst(nodes, accepted);
  const { depth, row, rows } = layout(order.nodes);
  const kind = (at) => (at === order.bonus ? "bonus" : accepted.has(order.from[at]) ? "accepted" : "rejected");
  const x = (at) => CELL.left + depth[at] * CELL.width;
  const y = (at) => CELL.top + row[at] * CELL.height;
  const columns = Math.max(...depth) + 1;
  const width = CELL.left * 2 + (columns - 1) * CELL.width + CELL.boxWidth;
  const height = CELL.top * 2 + rows * CELL.height;
  const label = `${round.nodes.length} nodes, ${round.path.length} accepted: ` +
    round.path.map((at) => visible(round.nodes[at].text)).join(" ") + `, bonus ${visible(round.bonus.text)}`;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const edges = order.nodes.map((node, at) => (node.parent < 0 ? null : edge(x, y, node.parent, at, kind(at))));
  picture.append(...edges.filter(Boolean));
  order.nodes.forEach((node, at) => picture.append(box(node, x(at), y(at), kind(at))));
  return picture;
}

function edge(x, y, parent, at, kind) {
  const [fromX, fromY] = [x(parent) + CELL.boxWidth, y(parent) + CELL.boxHeight / 2];
  const [toX, toY] = [x(at), y(at) + CELL.boxHeight / 2];
  const middle = (fromX + toX) / 2;
  return svg("path", { class: kind, d: `M${fromX} ${fromY}C${middle} ${fromY} ${middle} ${toY} ${toX} ${toY}` });
}

function box(node, x, y, kind) {
  const text = visible(node.text);
  const short = text.length > 10 ? `${text.slice(0, 9)}…` : text;
  const group = svg("g", { class: kind, transform: `translate(${x} ${y})` });
  const title = svg("title", {}, node.prob === null ? `${text}, bonus` : `${text}, ${percent(node.prob)}`);
  group.append(title, svg("rect", { width: CELL.boxWidth, height: CELL.boxHeight, rx: 5 }));
  group.append(svg("text", { x: CELL.boxWidth / 2, y: 16, "text-anchor": "middle" }, short));
  const note = node.prob === null ? "bonus" : node.parent < 0 ? "root" : percent(node.prob);
  group.append(svg("text", { class: "prob", x: CELL.boxWidth / 2, y: 35, "text-anchor": "middle" }, note));
  return group;
}

// Renumbers the nodes so that the accepted child comes first: the accepted path is then the top row.
function acceptedFirst(nodes, accepted) {
  const children = nodes.map(() => []);
  const bonus = nodes.length - 1;
  nodes.forEach((node, at) => node.parent >= 0 && children[node.parent].push(at));
  const rank = (at) => (accepted.has(at) || at === bonus ? 0 : 1);
  const from = [];
  const visit = (at) => {
    from.push(at);
    children[at].sort((a, b) => rank(a) - rank(b) || a - b).forEach(visit);
  };
  visit(0);
  const to = new Map(from.map((old, at) => [old, at]));
  const moved = from.map((old) => ({ ...nodes[old], parent: nodes[old].parent < 0 ? -1 : to.get(nodes[old].parent) }));
  return { nodes: moved, from, bonus: to.get(bonus) };
}

function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

function percent(value) {
  return value >= 0.01 ? `${(value * 100).toFixed(0)}%` : "<1%";
}

$("form").addEventListener("submit", run);
$("stop").addEventListener("click", () => view.running?.abort());
$("previous").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
$("key").addEventListener("change", loadModel);
$("tree").addEventListener("keydown", (event) => {
  if (event.key === "PageDown" || event.key === "n") turn(1);
  else if (event.key === "PageUp" || event.key === "p") turn(-1);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  if (event.key === "Escape") view.running?.abort();
});
loadModel().catch(() => ($("model").textContent = "the server does not answer"));
