//! Formats an [`Evaluation`] as text.

use std::fmt;

use super::{ClassReport, Evaluation};
use crate::types::{counted, plural};

/// The largest number of classes for which the confusion matrix and the results of each class are printed.
const CLASSES_PRINTED_MAX: usize = 20;

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Regression { rows, rows_without_target, mae, rmse, r2 } => {
                write_row_counts(f, *rows, *rows_without_target)?;
                writeln!(f, "{:<16} {mae:.6}", "MAE")?;
                writeln!(f, "{:<16} {rmse:.6}", "RMSE")?;
                match r2 {
                    Some(r2) => writeln!(f, "{:<16} {r2:.6}", "R²"),
                    None => writeln!(f, "{:<16} not defined: all targets are the same", "R²"),
                }
            }
            Self::Text { tokens, loss, perplexity } => {
                writeln!(f, "{:<16} {tokens}", "tokens")?;
                writeln!(f, "{:<16} {loss:.6}", "loss")?;
                writeln!(f, "{:<16} {perplexity:.6}", "perplexity")
            }
            Self::Classification {
                rows,
                rows_without_target,
                accuracy,
                log_loss,
                macro_f1,
                top_k,
                auc,
                classes,
                confusion_matrix,
                confusions,
            } => {
                write_row_counts(f, *rows, *rows_without_target)?;
                writeln!(f, "{:<16} {accuracy:.6}", "accuracy")?;
                if let Some(top) = top_k {
                    writeln!(f, "{:<16} {:.6}", format!("top-{} accuracy", top.k), top.accuracy)?;
                }
                writeln!(f, "{:<16} {log_loss:.6}", "log loss")?;
                writeln!(f, "{:<16} {macro_f1:.6}", "macro F1")?;
                if let Some(auc) = auc {
                    let positive = &classes[1].name;
                    writeln!(f, "{:<16} {auc:.6} (the positive class is {positive:?})", "AUC")?;
                }
                match confusion_matrix {
                    Some(matrix) if classes.len() <= CLASSES_PRINTED_MAX => {
                        write_classes(f, classes)?;
                        write_matrix(f, classes, matrix)
                    }
                    _ => write_confusions(f, confusions),
                }
            }
        }
    }
}

fn write_row_counts(f: &mut fmt::Formatter<'_>, rows: u64, rows_without_target: u64) -> fmt::Result {
    write!(f, "{:<16} {rows}", "rows")?;
    match rows_without_target {
        0 => writeln!(f),
        count => writeln!(f, ", without {} whose target is missing", counted(count, "row")),
    }
}

fn write_classes(f: &mut fmt::Formatter<'_>, classes: &[ClassReport]) -> fmt::Result {
    let width = width_of_names(classes);
    let header = ["precision", "recall", "F1", "rows"].map(|name| format!("{name:>10}")).concat();
    writeln!(f, "\n{:width$}{header}", "class")?;
    for ClassReport { name, support, precision, recall, f1 } in classes {
        let cells = [precision, recall, f1].map(|value| match value {
            Some(value) => format!("{value:>10.4}"),
            None => format!("{:>10}", "-"),
        });
        writeln!(f, "{name:width$}{}{support:>10}", cells.concat())?;
    }
    Ok(())
}

fn write_matrix(f: &mut fmt::Formatter<'_>, classes: &[ClassReport], matrix: &[Vec<u64>]) -> fmt::Result {
    let width = width_of_names(classes);
    let cell = width_of_names(classes).max(7) + 1;
    writeln!(f, "\nconfusion matrix: a row for each class, a column for each prediction")?;
    write!(f, "{:width$}", "")?;
    classes.iter().try_for_each(|class| write!(f, "{:>cell$}", class.name))?;
    writeln!(f)?;
    for (class, row) in classes.iter().zip(matrix) {
        write!(f, "{:width$}", class.name)?;
        row.iter().try_for_each(|count| write!(f, "{count:>cell$}"))?;
        writeln!(f)?;
    }
    Ok(())
}

fn write_confusions(f: &mut fmt::Formatter<'_>, confusions: &[(String, String, u64)]) -> fmt::Result {
    writeln!(f, "\nmost frequent confusions; --json has the results of each class")?;
    for (class, prediction, count) in confusions {
        let (noun, verb) = (plural(count, "row", "rows"), plural(count, "was", "were"));
        writeln!(f, "  {count:>8} {noun} of {class:?} {verb} predicted as {prediction:?}")?;
    }
    Ok(())
}

/// Returns the number of characters of the longest name, at least 5.
fn width_of_names(classes: &[ClassReport]) -> usize {
    classes.iter().map(|class| class.name.chars().count()).max().unwrap_or_default().max(5)
}
