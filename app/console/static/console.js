"use strict";
// Opens acts in the dialog, copies commands, moves by keys, and keeps pages live. Without scripts every link and form
// works as well.
(() => {
  const dialog = () => document.getElementById("dialog");

  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target !== dialog()) return;
    const link = event.detail.requestConfig.elt.closest("a[href]");
    // The session is over: the answer is the sign-in, which leads to the act's own page.
    if (link && !dialog().firstElementChild) { window.location.assign(link.href); return; }
    dialog().showModal();
    const field = dialog().querySelector("[autofocus]");
    if (field) field.focus();
  });

  // A refusal is a page of its own, and the browser has one for a service that does not answer: follow the link instead
  // of leaving the click without an effect.
  for (const failed of ["htmx:responseError", "htmx:sendError", "htmx:timeout"]) {
    document.addEventListener(failed, (event) => {
      const link = event.detail.elt.closest("a[href]");
      if (link) window.location.assign(link.href);
    });
  }
  document.addEventListener("htmx:beforeRequest", (event) => event.detail.elt.setAttribute("aria-busy", "true"));
  document.addEventListener("htmx:afterRequest", (event) => event.detail.elt.removeAttribute("aria-busy"));

  // What was done is said once: a reload would say it again when it may no longer be true.
  const address = new URL(window.location.href);
  if (address.searchParams.has("done")) {
    for (const name of ["done", "done_code"]) address.searchParams.delete(name);
    window.history.replaceState(window.history.state, "", address);
  }

  document.addEventListener("click", (event) => {
    const closing = event.target.closest("dialog [data-close]");
    if (closing) {
      event.preventDefault();
      dialog().close();
      return;
    }
    const copying = event.target.closest("[data-copy]");
    if (copying) copy(copying, document.getElementById(copying.dataset.copy));
  });

  const copy = (button, shown) => {
    const say = (text, forMs) => {
      button.textContent = text;
      setTimeout(() => { button.textContent = "Copy"; }, forMs);
    };
    const select = () => {
      window.getSelection().selectAllChildren(shown);
      say("Press Ctrl+C", 5000);
    };
    // Browsers have no clipboard for a page that came by HTTP from another machine, and a person can refuse it.
    if (!navigator.clipboard) select();
    else navigator.clipboard.writeText(shown.textContent).then(() => say("Copied", 1500), select);
  };

  // A second click while the answer is on its way must not act twice. A page that comes back can be sent again.
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    if (event.target.dataset.sent) event.preventDefault();
    event.target.dataset.sent = "yes";
  });
  window.addEventListener("pageshow", () => {
    for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (event.key === "/") {
      const field = document.querySelector("input[type=search], form.filters input:not([type=hidden])");
      if (field) { event.preventDefault(); field.focus(); }
    }
  });

  // A live page loads itself again when the state of the service has changed, and each minute: times and settings are in
  // no event. While a person uses the page it waits. A hidden tab has no stream: browsers open few connections to one
  // host.
  const main = () => document.getElementById("main");
  const events = main() && main().dataset.live;
  const AGAIN_MS = 2000, CONNECT_AGAIN_MS = 10000, LOAD_MS = 60000, ANSWER_MS = 30000, MESSAGE_MS = 15000;
  // Many pages begin together, when a service has started: they are not to ask together.
  const around = (ms) => ms * (0.75 + Math.random() / 2);
  // `current`: the state that the stream named last. The page is at least as new as the state `shown`.
  let shown = events ? main().dataset.seen : "", current = shown, seen = shown;
  let source = null, isConnected = false, isAvailable = true, hasFailed = false, isDue = false, loading = false;
  let waiting = 0, connecting = 0, due = 0, failures = 0;

  const isBehind = () => isDue || shown !== current;

  const isChanged = (field) => {
    if (field.matches("select")) return field.selectedIndex !== Math.max(0, [...field.options].findIndex((one) => one.defaultSelected));
    return field.value !== field.defaultValue || field.checked !== field.defaultChecked;
  };

  const isInUse = () =>
    dialog().open || !window.getSelection().isCollapsed || main().querySelector("[aria-busy]") !== null ||
    (main().contains(document.activeElement) && document.activeElement.closest("form") !== null) ||
    [...main().querySelectorAll("input, select, textarea")].some(isChanged);

  const show = () => {
    const sign = document.getElementById("live");
    const silent = ["bad", "Not live: the service does not answer"];
    // A load that failed is not repeated while the page is in use.
    const [tone, text] =
      !isConnected || !isAvailable ? silent :
      isBehind() && isInUse() ? ["wait", "Not live while you use this page"] : hasFailed ? silent : ["good", "Live"];
    if (sign.hidden || sign.textContent !== text) {
      sign.className = `live state ${tone}`;
      sign.textContent = text;
      sign.hidden = false;
    }
  };

  // What can have the focus.
  const focusable = (tag) => [...main().querySelectorAll("a[href], button, summary, [tabindex]")].filter((one) => one.tagName === tag);

  // Returns a function that gives the focus back after the elements of the page were replaced: to what has the same
  // address, else the same text. A region that scrolls has neither, so its place counts; of a link another one is no
  // substitute.
  const keepFocus = () => {
    const focused = document.activeElement;
    if (focused === main() || !main().contains(focused)) return () => {};
    const ways = [(one) => one.getAttribute("href") || one.id, (one) => !one.matches("[tabindex]") && one.textContent];
    if (!focused.matches("a, button")) ways.push((one) => one.tagName);
    const wanted = ways.map((way) => {
      const name = way(focused);
      return [way, name, name && focusable(focused.tagName).filter((one) => way(one) === name).indexOf(focused)];
    });
    return () => {
      const found = wanted.filter(([, name]) => name).map(([way, name, at]) => {
        const alike = focusable(focused.tagName).filter((one) => way(one) === name);
        return alike[at] || alike[0];
      });
      (found.find((one) => one) || main()).focus({ preventScroll: true });
    };
  };

  const replace = (next) => {
    const all = (selector) => [...main().querySelectorAll(selector)];
    const focusAgain = keepFocus();
    const opened = all("details").map((one) => one.open);
    const scrolled = all(".scroll").map((one) => one.scrollLeft);
    // The message of an act stays the same element: a new one would be read aloud again.
    const said = performance.now() < MESSAGE_MS ? main().querySelector(":scope > .done") : null;
    for (const one of [...main().childNodes]) if (one !== said) one.remove();
    main().append(...next);
    window.htmx.process(main());
    const details = all("details"), tables = all(".scroll");
    if (details.length === opened.length) details.forEach((one, at) => { one.open = opened[at]; });
    if (tables.length === scrolled.length) tables.forEach((one, at) => { one.scrollLeft = scrolled[at]; });
    focusAgain();
  };

  const loadWithin = (ms) => {
    clearTimeout(due);
    due = setTimeout(() => { isDue = true; load(); }, ms);
  };

  // What a repetition may cure, unlike a session that is over or a subscription that is deleted: that page says so.
  // The answer of a proxy is none: it has no page of the console.
  const isRefused = (answer, page) =>
    page.getElementById("main") !== null &&
    (answer.redirected || (answer.status >= 400 && answer.status < 500 && ![408, 429].includes(answer.status)));

  const load = async () => {
    clearTimeout(waiting);
    if (loading || document.hidden || !isBehind()) return;
    if (!isInUse()) {
      loading = true;
      const asked = current;
      let isDone = false;
      // It may become due once more meanwhile.
      isDue = false;
      try {
        // Another process may answer than the one of the stream, and not know the state that the stream named.
        const headers = { accept: "text/html", ...(asked && { "last-event-id": asked }) };
        const answer = await fetch(window.location.href, { headers, signal: AbortSignal.timeout(ANSWER_MS) });
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        hasFailed = !answer.ok && !isRefused(answer, page);
        if (!hasFailed && !isInUse()) {
          if (isRefused(answer, page)) { window.location.reload(); return; }
          replace(page.getElementById("main").childNodes);
          shown = asked;
          isDone = true;
          loadWithin(around(LOAD_MS));
        }
      } catch {
        hasFailed = true;
      } finally {
        loading = false;
        failures = hasFailed ? failures + 1 : 0;
        if (!isDone) isDue = true;
      }
    }
    show();
    if (isBehind()) waiting = setTimeout(load, failures ? around(Math.min(LOAD_MS, AGAIN_MS * 2 ** (failures - 1))) : AGAIN_MS);
  };

  const disconnect = () => {
    clearTimeout(connecting);
    if (source) source.close();
    source = null;
  };

  const connected = (is) => { isConnected = is; show(); };

  const connect = () => {
    disconnect();
    source = new EventSource(seen ? `${events}?after=${encodeURIComponent(seen)}` : events);
    source.addEventListener("open", () => connected(true));
    source.addEventListener("stats", (event) => {
      seen = current = event.lastEventId;
      isAvailable = true;
      connected(true);
      load();
    });
    source.addEventListener("unavailable", (event) => { seen = event.lastEventId; isAvailable = false; show(); });
    source.addEventListener("error", () => {
      // After a lost connection the browser connects again, after a refusal it does not. A stream's usual end is no
      // fault, so the sign changes only if connecting fails.
      if (source && source.readyState === EventSource.CLOSED) {
        connected(false);
        connecting = setTimeout(connect, CONNECT_AGAIN_MS);
      } else {
        connecting = setTimeout(() => { if (source && source.readyState !== EventSource.OPEN) connected(false); }, CONNECT_AGAIN_MS);
      }
    });
  };

  if (events && window.EventSource) {
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) { disconnect(); return; }
      connect();
      load();
    });
    loadWithin(around(LOAD_MS));
    if (!document.hidden) connect();
  }
})();
