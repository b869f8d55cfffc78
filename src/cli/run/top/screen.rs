//! The terminal of `ringrun top`: draws text on the alternate screen, reads keys, and restores the terminal at the end.

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// The size that is assumed if the terminal does not tell its size.
const SIZE_DEFAULT: (usize, usize) = (24, 80);
/// Ctrl-C, which is a byte while the terminal sends no signals.
const CTRL_C: u8 = 3;

/// What a text on the screen is.
#[derive(Clone, Copy)]
pub(super) enum ScreenContent {
    Tables,
    Sentence,
}

/// The terminal. Dropping it restores the terminal.
pub(super) struct Screen {
    /// The modes of the terminal at the start. `None` if the standard input is not a terminal, or has ended.
    saved_modes: Option<Termios>,
    /// Whether keys can be read.
    reads_keys: bool,
    has_signal: Arc<AtomicBool>,
    handlers: Vec<SigId>,
}

impl Screen {
    /// Changes to the alternate screen. Keys are then neither shown nor turned into signals.
    pub(super) fn open() -> io::Result<Self> {
        let has_signal = Arc::new(AtomicBool::new(false));
        let mut screen = Self { saved_modes: None, reads_keys: false, has_signal, handlers: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            screen.handlers.push(signal_hook::flag::register(signal, Arc::clone(&screen.has_signal))?);
        }
        if let Ok(modes) = tcgetattr(io::stdin()) {
            let mut raw = modes.clone();
            raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
            screen.saved_modes = Some(modes);
            tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
            screen.reads_keys = true;
        }
        // The alternate screen, without cursor and without line wrapping.
        write_now("\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        Ok(screen)
    }

    /// Replaces the content of the screen by the first lines of `text`. Cuts long lines of tables, and continues a long sentence
    /// on the next line.
    pub(super) fn draw(&mut self, text: &str, content: ScreenContent) -> io::Result<()> {
        let (rows, columns) = tcgetwinsize(io::stdout())
            .ok()
            .map(|size| (usize::from(size.ws_row), usize::from(size.ws_col)))
            .filter(|&(rows, columns)| rows > 0 && columns > 0)
            .unwrap_or(SIZE_DEFAULT);
        let keys = if self.reads_keys { "q leaves" } else { "Ctrl-C leaves" };
        let mut frame = format!("\x1b[H\x1b[1mringrun top\x1b[0m, refreshed each second; {keys}\x1b[K");
        let lines = match content {
            ScreenContent::Tables => text.lines().map(|line| line.chars().take(columns).collect()).collect(),
            ScreenContent::Sentence => {
                text.chars().collect::<Vec<_>>().chunks(columns).map(String::from_iter).collect::<Vec<_>>()
            }
        };
        for line in lines.iter().take(rows.saturating_sub(1)) {
            frame += "\r\n";
            frame += line;
            frame += "\x1b[K";
        }
        write_now(&(frame + "\x1b[J"))
    }

    /// Waits for `time`. Returns true as soon as the user presses q or Ctrl-C, or a signal arrives.
    pub(super) fn wait_for_leave(&mut self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            if self.has_signal.load(Ordering::Relaxed) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let stdin = io::stdin();
            let mut descriptors = vec![PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)];
            descriptors.truncate(usize::from(self.reads_keys));
            match poll(&mut descriptors, Timespec::try_from(left).ok().as_ref()) {
                Ok(1..) if self.reads_leave_key() => return true,
                // A signal has interrupted the wait, or the time is over: the loop checks both.
                _ => {}
            }
        }
    }

    /// Reads the keys that the user has pressed.
    fn reads_leave_key(&mut self) -> bool {
        let mut keys = [0; 64];
        if let Ok(count @ 1..) = rustix::io::read(io::stdin(), &mut keys) {
            return keys[..count].iter().any(|key| matches!(*key, b'q' | b'Q' | CTRL_C));
        }
        // Without input, only a signal ends the program.
        self.reads_keys = false;
        false
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone, there is nothing to restore.
        let _ = write_now("\x1b[?7h\x1b[?25h\x1b[?1049l");
        if let Some(modes) = &self.saved_modes {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, modes);
        }
        for handler in self.handlers.drain(..) {
            signal_hook::low_level::unregister(handler);
        }
    }
}

fn write_now(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
