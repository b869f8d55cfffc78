//! Checks the pages of a column before the crate `parquet` decodes them.

use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result};

/// Reads the pages of a column. Refuses a dictionary that announces more values than it has bytes, because the crate
/// `parquet` would allocate memory for all announced values.
pub(super) struct CheckedPages {
    pages: Box<dyn PageReader>,
}

impl CheckedPages {
    pub(super) fn new(pages: Box<dyn PageReader>) -> Self {
        Self { pages }
    }
}

/// Returns an error if the page is a dictionary that announces more values than it has bytes.
fn check_page(page: Option<Page>) -> Result<Option<Page>> {
    match &page {
        Some(Page::DictionaryPage { buf, num_values, .. }) if *num_values as usize > buf.len() => {
            let bytes = buf.len();
            Err(ParquetError::General(format!("a dictionary of {bytes} bytes announces {num_values} values")))
        }
        _ => Ok(page),
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        check_page(self.pages.get_next_page()?)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.pages.skip_next_page()
    }

    fn supports_deferred_dictionary(&self) -> bool {
        self.pages.supports_deferred_dictionary()
    }

    fn take_deferred_dictionary(&mut self) -> Result<Option<Page>> {
        check_page(self.pages.take_deferred_dictionary()?)
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.pages.at_record_boundary()
    }
}

#[cfg(test)]
mod tests {
    use ::parquet::basic::Encoding;

    use super::*;

    #[test]
    fn a_dictionary_with_fewer_bytes_than_values_is_refused() {
        for (num_values, is_valid) in [(0, true), (3, true), (4, false), (u32::MAX, false)] {
            let buf = vec![0; 3].into();
            let page = Page::DictionaryPage { buf, num_values, encoding: Encoding::PLAIN, is_sorted: false };
            assert_eq!(check_page(Some(page)).is_ok(), is_valid, "{num_values}");
        }
    }
}
