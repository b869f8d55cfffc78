//! The options for the files with the curves of a run.

use std::path::PathBuf;

use super::tensorboard::TensorBoard;

/// The files to which rank 0 writes the curves of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CurveFiles {
    /// The path of an SVG picture that shows the losses, and the accuracy or R², of all recorded epochs. `None` draws
    /// no picture.
    pub plot: Option<PathBuf>,
    /// The path of a page in HTML that shows the curves, the times and bytes of each rank, and the results. `None` writes no
    /// page.
    pub html: Option<PathBuf>,
    /// Where to record curves for `TensorBoard`. `None` records no curves.
    pub tensorboard: Option<TensorBoard>,
}
