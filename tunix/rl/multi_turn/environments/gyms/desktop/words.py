"""Lists every word that the desktop's tasks and scenes are made of.

One place, so that a tokenizer can be trained on all of them and a test can
count them. Does not decide which family uses which word.
"""

from __future__ import annotations

# Words typed into fields: lower case, three to six letters.
TYPING_WORDS = (
    "apple", "arrow", "bread", "bridge", "cable", "candle", "castle", "cat",
    "chair", "cloud", "copper", "corn", "dance", "dog", "dragon", "eagle",
    "farm", "fish", "flame", "forest", "fox", "garden", "ghost", "gold",
    "grape", "hat", "honey", "horse", "island", "jacket", "jungle", "key",
    "kite", "lake", "lemon", "lion", "map", "maple", "mirror", "moon",
    "night", "ocean", "olive", "onion", "paper", "pearl", "piano", "planet",
    "queen", "rain", "river", "robot", "salt", "silver", "snow", "spider",
    "sugar", "sun", "table", "tiger", "tree", "violin", "wheel", "zebra",
)  # fmt: skip

BUTTON_LABELS = (
    "OK", "Save", "Open", "Send", "Next", "Back", "Help", "Yes",
    "No", "Print", "Copy", "Paste", "Edit", "Undo", "Find", "Stop",
)  # fmt: skip

# Name -> RGB of a coloured shape; far apart in hue and brightness.
COLORS = {
  "red": (220, 40, 40),
  "green": (30, 160, 70),
  "blue": (40, 90, 225),
  "yellow": (245, 205, 30),
  "purple": (145, 60, 190),
  "orange": (245, 130, 20),
}

SHAPES = ("square", "circle", "triangle", "diamond", "star")

ICON_NAMES = (
    "Mail", "Music", "Files", "Photos", "Clock", "Notes",
    "Maps", "Chat", "Trash", "Games", "Camera", "Books",
)  # fmt: skip

# Labels of check boxes, radio buttons and list rows.
CHOICES = (
    "Apple", "Banana", "Cherry", "Lemon", "Mango", "Peach",
    "Red", "Green", "Blue", "Gold", "Pink", "Grey",
    "Small", "Large", "Fast", "Slow", "North", "South",
    "East", "West", "Tea", "Milk", "Bread", "Rice",
)  # fmt: skip

FIELD_NAMES = (
    "name", "city", "email", "phone", "title", "user", "street", "note",
)  # fmt: skip

DROP_DOWN_NAMES = ("size", "color", "mode", "font", "unit", "day")

SLIDER_NAMES = ("volume", "light", "speed", "zoom", "bass", "heat")

MENU_ITEMS = (
    "Cut", "Copy", "Paste", "Rename", "Delete", "Share", "Rotate", "Pin",
)  # fmt: skip

TAB_NAMES = ("Home", "View", "Tools", "Files", "Users", "Log")

WINDOW_TITLES = (
    "Editor", "Player", "Report", "Setup", "Viewer", "Wizard", "Studio",
    "Office", "Store", "Travel",
)  # fmt: skip

MESSAGES = (
    "Save changes?", "File not found", "Disk is full", "Update ready",
    "Low battery", "Try again?", "All done", "Delete file?",
)  # fmt: skip

DIALOG_BUTTONS = ("OK", "Cancel", "Yes", "No", "Retry", "Later")

# Key combinations of the shortcut family, as a user writes them.
SHORTCUTS = (
    "ctrl+s", "ctrl+z", "ctrl+f", "ctrl+p", "ctrl+n", "ctrl+o",
    "enter", "escape", "tab", "f1", "f5", "delete",
    "alt+f4", "ctrl+shift+t", "ctrl+alt+k", "shift+f10",
)  # fmt: skip

# Subjects of the facts in the question family.
FACT_NAMES = (
    "Price", "Total", "Room", "Code", "Gate", "Floor", "Seat", "Score",
)  # fmt: skip


def all_words() -> tuple[str, ...]:
  """Returns every distinct word above, in a fixed order."""
  groups = (
      TYPING_WORDS, BUTTON_LABELS, tuple(COLORS), SHAPES, ICON_NAMES, CHOICES,
      FIELD_NAMES, DROP_DOWN_NAMES, SLIDER_NAMES, MENU_ITEMS, TAB_NAMES,
      WINDOW_TITLES, MESSAGES, DIALOG_BUTTONS, SHORTCUTS, FACT_NAMES,
  )  # fmt: skip
  return tuple(dict.fromkeys(word for group in groups for word in group))
