"""Figures of matplotlib beside the histogram: layers against adapters, and shares along the text."""

from __future__ import annotations

from typing import Any

import numpy as np

from molora_cli.core.stats import Stats
from molora_cli.core.trace import Trace
from molora_cli.views.coloured import chosen_groups, layer_range
from molora_cli.views.figure import drawn_columns, look, panel_title, plain
from molora_cli.views.position import place

_PANELS, _ACROSS = 7, 4
_DARK = 0.6  # shares from here on are written in white


def heatmap(trace: Trace, stats: Stats) -> Any:
    """Rows: groups of layers, a panel per domain; with one group one panel whose rows are the domains."""
    from matplotlib.figure import Figure

    columns, groups = drawn_columns(stats), stats.groups
    if len(groups) == 1:
        parts = groups[0].domains if len(groups[0].domains) == 1 else [*groups[0].domains, groups[0].total]
        panels = [("", [(plain(p.label), p) for p in parts])]
    else:
        layers = [layer_range(trace, g) for g in range(len(groups))]
        panels = [("all text", list(zip(layers, [g.total for g in groups], strict=True)))]
        if len(groups[0].domains) > 1:
            for i, domain in enumerate(groups[0].domains):
                rows = list(zip(layers, [g.domains[i] for g in groups], strict=True))
                panels.append((plain(domain.label), rows))
    left_out = " of messages" if stats.template_tokens and not stats.template_counted else ""
    title = f"Where {stats.tokens:,} tokens{left_out} go"
    if len(panels) > _PANELS:
        title += f" (the first {_PANELS - 1} of {len(panels) - 1} domains)"
        panels = panels[:_PANELS]
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    height = max(1, len(panels[0][1]))
    size = (min(28.0, 2.2 + across * (0.6 + 0.42 * len(columns))), 0.8 + down * (1.0 + 0.25 * height))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    image: Any = None
    for panel, (name, named) in zip(axes, panels, strict=False):
        shares = np.array([[part.share[i] for i in columns] for _, part in named]).reshape(-1, len(columns))
        image = panel.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        panel.set_xticks(
            range(len(columns)), [plain(stats.names[i]) for i in columns], rotation=45, ha="right"
        )
        panel.set_yticks(range(len(named)), [row for row, _ in named])
        for (row, column), share in np.ndenumerate(shares):
            colour = "white" if share > _DARK else "black"
            panel.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=7)
        panel.set_title(name, fontsize="medium")
        if len(groups) > 1:
            panel.set_ylabel("layers")
    figure.suptitle(title, fontsize="medium")
    figure.colorbar(image, ax=axes.tolist(), label="tokens, % by first choice", fraction=0.05)
    return figure


def position(trace: Trace, stats: Stats) -> Any:
    """Stacked bars, one per step of places in the text; a panel per group of layers (ends and middle)."""
    from matplotlib.figure import Figure

    chosen, columns = chosen_groups(len(stats.groups)), drawn_columns(stats)
    steps = len(stats.groups[0].positions)
    figure = Figure(figsize=(max(5.0, 2.6 + 0.62 * steps), 0.9 + 2.5 * len(chosen)), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False, sharex=True)[:, 0]
    for row, (panel, number) in enumerate(zip(panels, chosen, strict=True)):
        shares = 100 * np.array(stats.groups[number].positions).reshape(steps, len(stats.names))
        bottom = np.zeros(steps)
        for index in columns:
            panel.bar(range(steps), shares[:, index], 0.9, bottom=bottom, **look(stats, index))
            bottom += shares[:, index]
        panel.set_ylim(0, 100)
        panel.set_ylabel("tokens, % by first choice")
        panel.spines[["top", "right"]].set_visible(False)
        title = panel_title(trace, stats, number, "go along the text", first=row == 0)
        panel.set_title(title, fontsize="medium", loc="left")
    counts = stats.groups[0].position_tokens
    panels[-1].set_xticks(range(steps), [f"{place(i)}\nn={counts[i]:,}" for i in range(steps)], fontsize=7)
    panels[-1].set_xlabel("place in the text, tokens")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    return figure
