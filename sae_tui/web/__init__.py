"""The app in a browser on this machine: the server, one process per session, and the page with the terminal."""

# The value of TEXTUAL_DRIVER in a session's process.
BROWSER_DRIVER = "sae_tui.terminal.browser_driver:BrowserDriver"
