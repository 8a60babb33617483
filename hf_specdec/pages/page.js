"use strict";
// Shows the round that is pointed at, tapped or focused; arrow keys move from round to round. All text goes in as text.
(() => {
  const data = JSON.parse(document.getElementById("rounds").textContent);
  const panel = document.getElementById("round");
  const hint = panel.firstElementChild;
  let pinned = null;

  function element(name, className, ...children) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }

  const visible = (piece) =>
    (/^[\p{C}\p{M}]*$/u.test(piece.replace(/[\n\t]/g, " ")) ? "\u2026" : "") +
    piece.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7");

  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  function token(round, place) {
    const stayed = round.kept.includes(place);
    const shown = element(stayed ? "span" : "del", `piece ${stayed ? "kept" : ""} ${round.style}`);
    shown.append(visible(round.drafted[place]));
    return element("span", "", shown, stayed ? "\u2713 " : "\u2717 ");
  }

  // What was drafted behind a place, -1 for the text: a line for every branch, indented where it parts.
  function branches(round, parent) {
    const parents = round.parents ?? round.drafted.map((_, place) => place - 1);
    const behind = (place) => parents.flatMap((other, index) => (other === place ? [index] : []));
    const list = element("ul", "");
    for (const first of behind(parent)) {
      const run = [first];
      let next = behind(first);
      while (next.length === 1) {
        run.push(next[0]);
        next = behind(next[0]);
      }
      list.append(element("li", "", ...run.map((place) => token(round, place))));
      if (next.length) list.lastChild.append(branches(round, run[run.length - 1]));
    }
    return list;
  }

  function times(round) {
    const entries = Object.entries(round.seconds);
    const total = entries.reduce((sum, [, seconds]) => sum + seconds, 0);
    const parts = entries.map(([phase, seconds]) => `${phase} ${(1000 * seconds).toFixed(1)}`).join(", ");
    const shared = round.sharing > 1 ? `, for ${round.sharing} texts together` : "";
    return `${(1000 * total).toFixed(1)} ms${shared} (${parts})`;
  }

  function show(at) {
    if (!at) {
      panel.replaceChildren(hint);
      return;
    }
    const rounds = data.rows[at.closest(".text").dataset.row];
    const round = rounds[at.dataset.round];
    const parts = [element("h3", "", `Round ${Number(at.dataset.round) + 1} of ${rounds.length}`)];
    if (round.arm !== null) {
      parts.push(element("p", "", `${round.arm} drafted ${plural(round.drafted.length, "token")}; ${round.kept.length} stayed.`));
      parts.push(branches(round, -1));
    }
    if (round.last !== null) {
      const own = element("span", `piece ${round.last}`, visible(round.own));
      parts.push(element("p", "", own, " ", data.meanings[round.last]));
    }
    parts.push(element("p", "hint", times(round)));
    panel.replaceChildren(...parts);
    panel.scrollTop = 0;
  }

  function pin(at) {
    if (pinned) pinned.removeAttribute("aria-current");
    pinned = at;
    if (at) {
      at.setAttribute("aria-current", "true");
      for (const other of at.parentElement.children) other.tabIndex = other === at ? 0 : -1;
    }
    show(at);
  }

  // The round above or below: the one whose middle is nearest, on the next line that way.
  function onNextLine(at, rounds, way) {
    const here = at.getClientRects()[way > 0 ? at.getClientRects().length - 1 : 0];
    const middle = (here.left + here.right) / 2;
    let best = null;
    for (const other of rounds) {
      for (const box of other.getClientRects()) {
        const down = way * (box.top - here.top);
        const distance = down * 1000 + Math.abs((box.left + box.right) / 2 - middle);
        if (other !== at && down > here.height / 2 && (!best || distance < best.distance)) best = { other, distance };
      }
    }
    return best && best.other;
  }

  function target(event, at) {
    const rounds = [...at.parentElement.children];
    const place = rounds.indexOf(at);
    switch (event.key) {
      case "ArrowRight": return rounds[place + 1];
      case "ArrowLeft": return rounds[place - 1];
      case "ArrowDown": return onNextLine(at, rounds, 1);
      case "ArrowUp": return onNextLine(at, rounds, -1);
      case "Home": return rounds[0];
      case "End": return rounds[rounds.length - 1];
      default: return undefined;
    }
  }

  for (const text of document.querySelectorAll(".text")) {
    const roundOf = (event) => event.target.closest(".round");
    text.addEventListener("focusin", (event) => pin(roundOf(event)));
    text.addEventListener("click", (event) => roundOf(event) && pin(roundOf(event)));
    text.addEventListener("pointerover", (event) => event.pointerType === "mouse" && show(roundOf(event) || pinned));
    text.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(pinned));
    text.addEventListener("keydown", (event) => {
      const at = roundOf(event);
      if (!at || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") pin(null);
      const next = target(event, at);
      if (next === undefined && !/^(Arrow|Home|End)/.test(event.key)) return;
      event.preventDefault();
      if (next) next.focus();
    });
  }
})();
