// A small picture of every head of every layer; each is drawn when it comes into sight.
const THUMB = 96; // pixels of a picture at most; of more tokens the strongest weight of a block is shown
let watcher = null;

function drawHeads() {
  const section = document.getElementById("heads");
  const key = `${state.part} ${state.dark} ${section.clientWidth} ${state.firstRow} ${state.firstColumn}`;
  if (section.dataset.key !== key) {
    section.dataset.key = key;
    section.replaceChildren(makeGrid(section.clientWidth));
  }
  for (const button of section.querySelectorAll("button")) {
    const current = Number(button.dataset.layer) === state.layer && state.heads.length === 1 && Number(button.dataset.head) === state.heads[0];
    button.classList.toggle("current", current);
    button.tabIndex = button.dataset.layer === String(state.layer) && button.dataset.head === String(state.heads[0] || 0) ? 0 : -1;
  }
}

function makeGrid(width) {
  const [heads, layers] = [map().heads, map().layers];
  const [rows, columns] = [bounds("rows"), bounds("columns")];
  const thumb = Math.max(34, Math.min(118, Math.floor((width - 64) / heads.length) - 7));
  const grid = element("div", { class: "grid", "--thumb": `${thumb}px` });
  grid.style.gridTemplateColumns = `auto repeat(${heads.length}, max-content)`;
  grid.style.setProperty("--shape", Math.min(2, Math.max(0.5, (rows.stop - rows.begin) / (columns.stop - columns.begin))));
  grid.append(element("span", { class: "name side" }, "head →", element("br"), "layer ↓"), ...heads.map((head) => element("span", { class: "name" }, String(head))));
  const colours = ["blank", "plus", "minus"].map(colour);
  if (watcher) watcher.disconnect();
  watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      paintThumb(entry.target, rows, columns, colours);
    }
  }, { rootMargin: "300px" });
  layers.forEach((layer, i) => {
    grid.append(element("span", { class: "name side" }, String(layer)));
    heads.forEach((head, j) => {
      const canvas = element("canvas");
      canvas.width = canvas.height = 1;
      grid.append(element("button", { "data-layer": i, "data-head": j, "aria-label": `layer ${layer}, head ${head}`, title: `layer ${layer}, head ${head}` }, canvas));
      watcher.observe(canvas);
    });
  });
  return grid;
}

function paintThumb(canvas, rows, columns, [ground, plus, minus]) {
  const { layer, head } = canvas.parentElement.dataset;
  const block = Math.ceil(Math.max(rows.stop - rows.begin, columns.stop - columns.begin) / THUMB);
  canvas.height = Math.ceil((rows.stop - rows.begin) / block);
  canvas.width = Math.ceil((columns.stop - columns.begin) / block);
  const strongest = new Float32Array(canvas.width * canvas.height);
  for (let row = rows.begin; row < rows.stop; row++) {
    const start = rowStart(map(), Number(layer), Number(head), row);
    const line = Math.floor((row - rows.begin) / block) * canvas.width;
    for (let column = columns.begin; column < columns.stop; column++) {
      const strength = asStrength(map(), layer, head, bytes[start + column]);
      const place = line + Math.floor((column - columns.begin) / block);
      if (Math.abs(strength) > Math.abs(strongest[place])) strongest[place] = strength;
    }
  }
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  strongest.forEach((strength, i) => image.data.set([...shadeOf(strength, ground, plus, minus), 255], 4 * i));
  context.putImageData(image, 0, 0);
}

function listenToHeads() {
  document.getElementById("heads").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    [state.layer, state.heads] = [Number(button.dataset.layer), [Number(button.dataset.head)]];
    show("matrix");
  });
}

function moveInGrid(down, right) {
  const [layers, heads] = [map().layers.length, map().heads.length];
  state.layer = Math.max(0, Math.min(layers - 1, state.layer + down));
  state.heads = [Math.max(0, Math.min(heads - 1, (state.heads[0] || 0) + right))];
  draw();
  const button = document.querySelector(`#heads button[data-layer="${state.layer}"][data-head="${state.heads[0]}"]`);
  button.focus();
  button.scrollIntoView({ block: "nearest", inline: "nearest" });
}
