"""The app in a browser on this machine: the server, a process for each look, and the page with its terminal."""

# What the environment of a look's process says in TEXTUAL_DRIVER.
BROWSER_DRIVER = "sae_tui.terminal.browser_driver:BrowserDriver"
