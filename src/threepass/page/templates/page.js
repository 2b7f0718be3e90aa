"use strict";
for (const button of all(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    const series = Number(button.dataset.toggles);
    if (button.dataset.what) document.body.classList.toggle("no-" + button.dataset.what, !on);
    else if (on) hidden.delete(series);
    else hidden.add(series);
    for (const part of all(`.plot .key [data-series="${series}"]`)) part.classList.toggle("off", !on);
    redraw();
  });
}

// A table that is wider than the page says so.
function markScrolling() {
  for (const box of all(".scroll")) box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
}
markScrolling();
addEventListener("resize", markScrolling);

// A figure as a file: what is in view on the page, in light colours, with its key.
function whole(figure) {
  const shown = figure.querySelector(".plot"), svg = shown.cloneNode(true);
  const parts = all("*", svg);
  all("*", shown).forEach((part, i) => { if (getComputedStyle(part).display === "none") parts[i].remove(); });
  const [, , width, height] = svg.dataset.whole.split(" ");
  for (const [name, value] of Object.entries({ viewBox: svg.dataset.whole, width, height })) svg.setAttribute(name, value);
  const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
  style.textContent = document.getElementById("figure-style").textContent;
  svg.prepend(style);
  return { text: new XMLSerializer().serializeToString(svg), width: +width, height: +height };
}

function keep(url, name) {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
}

for (const button of all("[data-as]")) {
  button.addEventListener("click", async () => {
    const figure = button.closest("figure"), { text, width, height } = whole(figure);
    const url = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
    if (button.dataset.as === "svg") return keep(url, figure.id + ".svg");
    const picture = new Image(), canvas = document.createElement("canvas"), scale = 4;
    picture.src = url;
    await picture.decode();
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    keep(canvas.toDataURL("image/png"), figure.id + ".png");
  });
}
