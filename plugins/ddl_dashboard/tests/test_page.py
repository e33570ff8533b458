"""The colours of the page, read from its style sheet without a browser."""

from __future__ import annotations

import re
from importlib import resources

import pytest

Colour = tuple[float, float, float]  # red, green, blue, each from 0 to 255
STYLES = (resources.files("ddl_dashboard") / "page" / "page.css").read_text(encoding="utf-8")
ENOUGH = 4.5  # WCAG 2.1, level AA, for text of usual size


def colours(block: str) -> dict[str, Colour]:
    """Return the colours that a block of the style sheet defines, by name."""
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", block)
    return {name: (int(text[:2], 16), int(text[2:4], 16), int(text[4:], 16)) for name, text in found}


def schemes() -> dict[str, dict[str, Colour]]:
    """Return the colours of the page in a light and in a dark system."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLES, re.DOTALL)
    assert re.search(r"@media \(prefers-color-scheme: dark\) \{\s*:root \{" + re.escape(dark), STYLES)
    return {"light": colours(light), "dark": colours(dark)}


def brightness(colour: Colour) -> float:
    """Return the relative luminance of WCAG 2.1."""
    parts = [value / 255 for value in colour]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    light, dark = sorted((brightness(one), brightness(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def mixed(colour: Colour, share: float, below: Colour) -> Colour:
    red, green, blue = (share * top + (1 - share) * bottom for top, bottom in zip(colour, below))
    return (red, green, blue)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21.0)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


def test_a_dark_system_has_all_colours_of_its_own() -> None:
    """Its surfaces are dark, and the light ones are light."""
    light, dark = schemes().values()
    assert set(light) == set(dark) and {"page", "card", "text", "soft", "alert"} <= set(light)
    assert "color-scheme: light dark;" in STYLES, "scroll bars follow, too"
    for surface in ("page", "card", "alert"):
        assert brightness(dark[surface]) < 0.05 < 0.7 < brightness(light[surface])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast(scheme: str) -> None:
    """On the page, on cards, on the alert, and in the tinted rows of ranks that need attention."""
    colour = schemes()[scheme]
    tint = re.search(r"tr\.is-late.*color-mix\(in srgb, var\(--alert\) (\d+)%, transparent\)", STYLES)
    assert tint is not None
    row = mixed(colour["alert"], int(tint[1]) / 100, colour["card"])
    texts = {
        "page": ("text", "soft", "good", "bad"),
        "card": ("text", "soft", "good", "warn", "bad"),
        "alert": ("text", "soft"),
    }
    pairs = [(name, surface, colour[surface]) for surface, names in texts.items() for name in names]
    pairs += [(name, "a tinted row", row) for name in ("text", "soft", "warn", "bad")]
    low = {(name, where): contrast(colour[name], below) for name, where, below in pairs}
    assert {pair: value for pair, value in low.items() if value < ENOUGH} == {}
