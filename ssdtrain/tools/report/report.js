for (const figure of document.querySelectorAll('figure.chart')) {
  const data = JSON.parse(figure.querySelector('script').textContent);
  const svg = figure.querySelector('svg'), rule = figure.querySelector('.rule'), tip = figure.querySelector('.tip');
  const hide = () => { tip.style.display = 'none'; rule.style.visibility = 'hidden'; };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let at = 0;
    data.x.forEach((place, index) => { if (Math.abs(place - x) < Math.abs(data.x[at] - x)) at = index; });
    rule.setAttribute('x1', data.x[at]); rule.setAttribute('x2', data.x[at]); rule.style.visibility = 'visible';
    const head = document.createElement('b'); head.textContent = 'step ' + data.steps[at];
    tip.replaceChildren(head);
    for (const line of data.lines) {
      if (line.values[at] === null) continue;
      const row = document.createElement('div'), mark = document.createElement('i');
      mark.style.background = 'var(--c' + line.colour + ')';
      row.append(mark, line.label + ': ' + line.values[at] + ' ' + data.unit); tip.append(row);
    }
    tip.style.display = 'block';
    const left = data.x[at] * box.width / svg.viewBox.baseVal.width;
    tip.style.left = Math.max(0, left > box.width / 2 ? left - tip.offsetWidth - 12 : left + 12) + 'px'; tip.style.top = '8px';
  });
}
