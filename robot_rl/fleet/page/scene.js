"use strict";
// Comes before MuJoCo's viewer in its page. The viewer asks the root of its server; here it is below the page.

const here = (address) => {
  const asked = new URL(address, location.href);
  return new URL(`.${asked.pathname}${asked.search}`, location.href);
};

const fetched = window.fetch;
window.fetch = (asked, ...more) => fetched(typeof asked === "string" && asked.startsWith("/") ? here(asked) : asked, ...more);

window.WebSocket = class extends WebSocket {
  constructor(asked, ...more) {
    const at = here(asked);
    at.protocol = at.protocol.replace("http", "ws");
    super(at, ...more);
  }
};

document.addEventListener("contextmenu", (event) => event.preventDefault());
