//! Stores a column of texts. Each distinct text is stored once.

use std::collections::HashMap;
use std::sync::Arc;

/// The maximum number of distinct texts in a column.
const DISTINCT_TEXTS_MAX: usize = 1 << 24;
/// The maximum memory in bytes for the distinct texts of all columns of a table.
pub(crate) const TEXT_BYTES_MAX: usize = 1 << 31;
/// The approximate memory in bytes that a stored text needs in addition to its own bytes.
const TEXT_OVERHEAD_BYTES: usize = 64;

/// The texts of a column.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Texts {
    /// The index in `distinct` of the text of each row.
    pub(crate) indices: Vec<u32>,
    /// The distinct texts. After rows are left out, a distinct text may occur in no row.
    pub(crate) distinct: Vec<Arc<str>>,
}

impl Texts {
    /// Returns a copy of the texts of `rows`.
    pub(crate) fn select(&self, rows: &[usize]) -> Self {
        let indices = rows.iter().map(|&row| self.indices[row]).collect();
        Self { indices, distinct: self.distinct.clone() }
    }

    /// Adds the texts of more rows. If a distinct text is in both columns, it is usually one of the last texts of `self`.
    pub(crate) fn append(&mut self, other: Self) {
        let indices_here = other.distinct.into_iter().map(|text| {
            self.distinct.iter().rposition(|known| *known == text).unwrap_or_else(|| {
                self.distinct.push(text);
                self.distinct.len() - 1
            })
        });
        let indices_here: Vec<u32> = indices_here.map(|index| index as u32).collect();
        self.indices.extend(other.indices.iter().map(|&index| indices_here[index as usize]));
    }

    /// Returns the distinct texts that occur in `rows`, in the order of `distinct`.
    pub(crate) fn distinct_in(&self, rows: impl Iterator<Item = usize>) -> impl Iterator<Item = &str> {
        let mut used = vec![false; self.distinct.len()];
        for row in rows {
            used[self.indices[row] as usize] = true;
        }
        self.distinct.iter().zip(used).filter(|(_, used)| *used).map(|(text, _)| &**text)
    }
}

/// Collects texts without a limit on their number and their memory.
///
/// # Panics
///
/// If there are more than 2^32 distinct texts.
impl<'a> FromIterator<&'a str> for Texts {
    fn from_iter<T: IntoIterator<Item = &'a str>>(texts: T) -> Self {
        let mut distinct = DistinctTexts::default();
        let indices = texts.into_iter().map(|text| {
            let known = distinct.index_of.get(text).copied();
            known.unwrap_or_else(|| distinct.insert_new_text(text))
        });
        Self { indices: indices.collect(), distinct: distinct.texts }
    }
}

/// The maximum number of distinct texts from which [`advise_about_commas`] recognises numbers.
const TEXTS_TRIED_AS_NUMBERS_MAX: usize = 20;

/// Returns what the user can do if most of the first distinct texts of a column become numbers when a decimal point replaces
/// their comma. Returns an empty text for other columns.
pub(crate) fn advise_about_commas(distinct: &[Arc<str>]) -> String {
    let mut shown = distinct.iter().filter(|text| !text.is_empty()).take(TEXTS_TRIED_AS_NUMBERS_MAX);
    let is_number = |text: &str| text.replacen(',', ".", 1).parse::<f64>().is_ok_and(f64::is_finite);
    let (numbers, others): (Vec<&Arc<str>>, Vec<_>) = shown.by_ref().partition(|text| is_number(text));
    match numbers.iter().find(|text| text.contains(',')) {
        Some(first) if numbers.len() > others.len() => format!(
            "; if these are numbers with a decimal comma, such as `{first}`, replace the commas by decimal points in the data, so that \
             they are read as numbers"
        ),
        _ => String::new(),
    }
}

/// The memory in bytes that is left for the distinct texts of a table.
#[derive(Debug)]
pub(crate) struct TextBytesLeft(pub(crate) usize);

/// The distinct texts of a column.
#[derive(Debug, Default)]
pub(crate) struct DistinctTexts {
    pub(crate) texts: Vec<Arc<str>>,
    /// The index in `texts` of each text.
    index_of: HashMap<Arc<str>, u32>,
}

impl DistinctTexts {
    /// Returns the index of a text. Stores the text if it is new.
    ///
    /// # Errors
    ///
    /// If the text is new and exceeds a limit on distinct texts. The error is a sentence for the user.
    pub(crate) fn index_of(&mut self, text: &str, bytes_left: &mut TextBytesLeft) -> Result<u32, String> {
        match self.index_of.get(text) {
            Some(index) => Ok(*index),
            None => self.store_new_text(text, bytes_left),
        }
    }

    /// Stores a new text. Returns the index of the text in `distinct`.
    fn store_new_text(&mut self, text: &str, bytes_left: &mut TextBytesLeft) -> Result<u32, String> {
        if self.texts.len() == DISTINCT_TEXTS_MAX {
            return Err(format!("the column holds more than {DISTINCT_TEXTS_MAX} distinct texts"));
        }
        bytes_left.0 =
            bytes_left.0.checked_sub(text.len().saturating_add(TEXT_OVERHEAD_BYTES)).ok_or_else(|| {
                format!("the distinct texts of the table need more than {TEXT_BYTES_MAX} bytes of memory")
            })?;
        Ok(self.insert_new_text(text))
    }

    /// Stores a new text without a check of the limits. Returns the index of the text in `distinct`.
    fn insert_new_text(&mut self, text: &str) -> u32 {
        let index = u32::try_from(self.texts.len()).expect("a table has fewer than 2^32 rows");
        let text = Arc::<str>::from(text);
        self.texts.push(Arc::clone(&text));
        self.index_of.insert(text, index);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_is_stored_once() {
        let texts: Texts = ["b", "a", "b", "", "a"].into_iter().collect();
        assert_eq!((texts.indices.as_slice(), texts.distinct.len()), (&[0, 1, 0, 2, 1][..], 3));
        let part = texts.select(&[4, 3]);
        assert_eq!(part.indices, [1, 2]);
        assert_eq!(part.distinct_in(0..2).collect::<Vec<_>>(), ["a", ""]);
        let mut distinct = DistinctTexts::default();
        assert_eq!(distinct.index_of("long text", &mut TextBytesLeft(200)), Ok(0));
        assert!(Arc::ptr_eq(&distinct.texts[0], distinct.index_of.keys().next().unwrap()));
    }

    /// Regression test: a column of numbers with decimal commas became categories, and no message named the commas.
    #[test]
    fn numbers_with_a_decimal_comma_are_recognised() {
        for (texts, expected) in [
            (&["1,5", "-2,25", "3"][..], Some("`1,5`")),
            (&["", "3", "1,5e3", "unknown"], Some("`1,5e3`")),
            (&["1,5", "unknown"], None),
            (&["1,000,000", "2,000,000"], None),
            (&["1", "2"], None),
            (&["Oslo, Norway", "a"], None),
            (&[], None),
        ] {
            let texts: Vec<Arc<str>> = texts.iter().map(|&text| text.into()).collect();
            let advice = advise_about_commas(&texts);
            assert_eq!(advice.is_empty(), expected.is_none(), "{texts:?}: {advice}");
            assert!(advice.contains(expected.unwrap_or_default()), "{texts:?}: {advice}");
        }
    }

    /// Regression test: before the fix, nothing limited the memory for the texts of a small compressed file.
    #[test]
    fn the_memory_for_texts_is_limited() {
        let mut bytes_left = TextBytesLeft(2 * TEXT_OVERHEAD_BYTES + 8);
        let mut columns = [DistinctTexts::default(), DistinctTexts::default()];
        columns[0].index_of("four", &mut bytes_left).unwrap();
        assert!(columns[1].index_of("+four", &mut bytes_left).unwrap_err().contains("need more than"));
        columns[1].index_of("four", &mut bytes_left).unwrap();
        for column in &mut columns {
            column.index_of("four", &mut bytes_left).unwrap();
            let error = column.index_of("", &mut bytes_left).unwrap_err();
            assert!(error.contains("need more than 2147483648 bytes"), "{error}");
        }
    }
}
