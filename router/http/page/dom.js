// Makes elements. Text is always set as text, so nothing that a request or a model wrote is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "width%") element.style.width = `${value}%`; // set by script, which the security policy allows
    else if (name === "left%") element.style.left = `${value}%`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

export function html(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

export function find(selector) {
  return document.querySelector(selector);
}

// Sets the text only if it has changed, so that a selection and a screen reader are left alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
