//! The messages that a user writes: lines of a file or a pipe, or lines that are edited on a terminal.

use ottava_common::{Error, Result, interrupt};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use std::io::{self, BufRead, IsTerminal};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

/// The interval between checks for a signal while a message is awaited.
const POLL: Duration = Duration::from_millis(50);
/// The text before a message on a terminal.
const PROMPT: &str = "> ";

/// Where messages come from. A thread reads them, so that a signal can end the wait for the next message.
pub struct Input {
    messages: Receiver<io::Result<String>>,
    terminal: Option<Terminal>,
}

/// A terminal on which lines are edited.
struct Terminal {
    /// Asks the thread for the next message. Between messages, the thread leaves the terminal to answers.
    ask: Sender<()>,
    /// The mode of the terminal at the start. The editor changes the mode, and a signal may end the program while it does.
    mode: Option<Termios>,
}

impl Input {
    /// Reads standard input. If it and standard output are terminals, lines are edited and remembered, and pasted lines are one message.
    pub fn open() -> Result<Input> {
        match io::stdin().is_terminal() && io::stdout().is_terminal() {
            true => Input::edited(),
            false => Input::plain(),
        }
    }

    fn plain() -> Result<Input> {
        let (sender, messages) = sync_channel(0);
        start(move || drop(io::stdin().lock().lines().try_for_each(|line| sender.send(line))))?;
        Ok(Input { messages, terminal: None })
    }

    fn edited() -> Result<Input> {
        let failed = |error: ReadlineError| Error::Io { path: "the terminal".into(), source: io::Error::other(error) };
        let config = Config::builder().bracketed_paste(true).auto_add_history(true).build();
        let mode = tcgetattr(io::stdin()).ok();
        let mut editor = Editor::<(), _>::with_history(config, MemHistory::new()).map_err(failed)?;
        let ((ask, asked), (sender, messages)) = (channel(), sync_channel(0));
        start(move || {
            while asked.recv().is_ok() {
                let message = match editor.readline(PROMPT) {
                    Ok(line) => Ok(line),
                    Err(ReadlineError::Eof) => return,
                    // In the mode of the editor, Ctrl-C is a key and no signal.
                    Err(ReadlineError::Interrupted) => return interrupt::flag().store(true, Ordering::Relaxed),
                    Err(error) => Err(io::Error::other(error)),
                };
                if sender.send(message).is_err() {
                    return;
                }
            }
        })?;
        Ok(Input { messages, terminal: Some(Terminal { ask, mode }) })
    }

    /// Whether a person writes the messages on a terminal.
    pub fn is_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// Returns the next message; `None` at the end of input, after a signal, and if another rank has ended.
    pub fn next(&self) -> Result<Option<String>> {
        if let Some(terminal) = &self.terminal {
            // If the thread has ended, the channel of messages tells it.
            let _ = terminal.ask.send(());
        }
        while !interrupt::flag().load(Ordering::Relaxed) {
            match self.messages.recv_timeout(POLL) {
                Ok(message) => return message.map(Some).map_err(Error::io("standard input")),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        Ok(None)
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        if let Some(mode) = self.terminal.as_ref().and_then(|terminal| terminal.mode.as_ref()) {
            // A terminal that has gone needs no mode.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, mode);
        }
    }
}

/// Starts the thread that reads.
fn start(read: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name("input".into());
    thread.spawn(read).map(drop).map_err(Error::io("a thread for standard input"))
}
