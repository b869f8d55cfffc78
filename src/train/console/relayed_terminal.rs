//! Sends a progress bar through a pipe to a program that shows the bar on its terminal.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::TermLike;

/// Sends a progress bar through a pipe to another program, for example `ringrun`. The other program shows the text
/// after the last carriage return on its own terminal. The bar is a single line, so the cursor never moves up or down.
pub(super) struct RelayedTerminal<W> {
    /// The width of the bar in characters.
    columns: u16,
    drawing: Mutex<Drawing<W>>,
}

struct Drawing<W> {
    /// The text since the last flush.
    text: String,
    out: W,
}

impl<W: Write> RelayedTerminal<W> {
    pub(super) fn new(columns: u16, out: W) -> Self {
        Self { columns, drawing: Mutex::new(Drawing { text: String::new(), out }) }
    }

    fn lock(&self) -> MutexGuard<'_, Drawing<W>> {
        self.drawing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W> fmt::Debug for RelayedTerminal<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayedTerminal").field("columns", &self.columns).finish_non_exhaustive()
    }
}

impl<W: Write + Send> TermLike for RelayedTerminal<W> {
    fn width(&self) -> u16 {
        self.columns
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.lock().text.push_str(text.trim_end());
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.lock().text.push_str("\r\x1b[K");
        Ok(())
    }

    /// Writes all text since the last flush in one write.
    fn flush(&self) -> io::Result<()> {
        let mut drawing = self.lock();
        let text = std::mem::take(&mut drawing.text);
        if text.is_empty() {
            return Ok(());
        }
        // The text begins with a carriage return, so that the text replaces the previous drawing.
        let start = if text.starts_with('\r') { "" } else { "\r" };
        drawing.out.write_all(format!("{start}{text}").as_bytes())?;
        drawing.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

    use super::*;

    #[derive(Clone, Default)]
    struct SharedText(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedText {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_drawing_replaces_the_previous_drawing_and_the_last_drawing_is_empty() {
        let text = SharedText::default();
        let terminal = RelayedTerminal::new(40, text.clone());
        let bar = ProgressBar::with_draw_target(Some(10), ProgressDrawTarget::term_like(Box::new(terminal)));
        let bar = bar.with_style(ProgressStyle::with_template("bar {wide_bar} {pos}/{len}").unwrap());
        bar.tick();
        bar.set_position(10);
        bar.suspend(|| text.clone().write_all(b"|").unwrap());
        bar.finish_and_clear();
        let text = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        assert!(!text.contains('\n') && text.starts_with('\r') && text.ends_with("\r\x1b[K"), "{text:?}");
        assert!(text.contains("\r\x1b[K|"), "the bar is still there when the line is written: {text:?}");
        for drawing in text.split('\r').skip(1) {
            let drawing = drawing.trim_start_matches("\x1b[K").trim_end_matches('|');
            assert!(drawing.is_empty() || drawing.starts_with("bar "), "{text:?}");
            assert!(drawing.chars().count() <= 40, "{drawing:?}");
        }
        assert!(text.contains(" 10/10"), "{text:?}");
    }
}
