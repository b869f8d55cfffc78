//! The options for reading a table, and the columns that these options choose.

use std::collections::BTreeSet;

use csv::ByteRecord;

use super::dialect::Separator;
use crate::train::data::MissingPolicy;
use crate::train::data::column_values::{ColumnKind, ColumnRole};

/// The default of [`TableOptions::categories_max`].
const CATEGORIES_MAX_DEFAULT: usize = 256;
/// A message that lists the columns of a table shows at most this number of names.
const COLUMN_NAMES_SHOWN_MAX: usize = 20;

/// Whether the first row of a table holds the names of the columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HeaderRow {
    /// The first row should hold the names of the columns. If the first row is certainly data, it is read as data, and the
    /// columns get the names 0, 1, 2 and so on. If the first row only looks like data, reading the table fails, so that no
    /// data is mistaken for names.
    #[default]
    Expected,
    /// The first row holds names, even if it looks like data.
    Present,
    /// The first row holds data. The columns get the names 0, 1, 2 and so on.
    Absent,
}

/// How to read a table. Columns are given by name or, if no column has this name, by number, counted from 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// Whether the first row holds the names of the columns.
    pub header: HeaderRow,
    /// The character between the cells of a row. If `None`, the separator is chosen from the first rows.
    pub separator: Option<Separator>,
    /// What to do with missing values in the features.
    pub missing: MissingPolicy,
    /// The columns to use as features. If the list is empty, all columns except for the target are features.
    pub features: Vec<String>,
    /// The columns to leave out.
    pub drop: Vec<String>,
    /// The columns that hold names of categories, even if these names are numbers.
    pub categorical: Vec<String>,
    /// The columns that hold dates. A date becomes the number of days since 1970; see
    /// [`ColumnEncoding`](crate::train::data::ColumnEncoding).
    pub dates: Vec<String>,
    /// The maximum number of inputs of a text column. If a column has more distinct texts, the texts are hashed to
    /// this number of inputs.
    pub categories_max: usize,
}

impl Default for TableOptions {
    fn default() -> Self {
        Self {
            header: HeaderRow::default(),
            separator: None,
            missing: MissingPolicy::default(),
            features: Vec::new(),
            drop: Vec::new(),
            categorical: Vec::new(),
            dates: Vec::new(),
            categories_max: CATEGORIES_MAX_DEFAULT,
        }
    }
}

impl TableOptions {
    /// Returns the command-line name of the first option that differs from its default. Returns `None` if all options
    /// have their defaults.
    pub(crate) fn name_of_first_given_option(&self) -> Option<&'static str> {
        let default = Self::default().options_equal_on_all_ranks();
        let differing = self
            .options_equal_on_all_ranks()
            .into_iter()
            .zip(default)
            .find(|(given, default)| given != default);
        differing.map(|((name, _), _)| name)
    }

    /// Returns whether one of the options that apply only to tables of text differs from its default.
    pub(crate) fn has_options_of_text_tables(&self) -> bool {
        self.header != HeaderRow::default() || self.separator.is_some()
    }

    /// Returns whether `target` and all options name columns by numbers, and not by texts of the first row `first`. If two
    /// cells of the row are equal, they cannot be names, so a number may be equal to a cell.
    pub(super) fn name_columns_by_number(&self, target: &str, first: &ByteRecord) -> bool {
        let lists = [&self.features, &self.drop, &self.categorical, &self.dates];
        let mut names = std::iter::once(target).chain(lists.into_iter().flatten().map(String::as_str));
        names.all(|name| is_column_number(name, first))
    }

    /// Returns the names and values of the options that must be the same on all ranks.
    pub(crate) fn options_equal_on_all_ranks(&self) -> Vec<(&'static str, String)> {
        let Self { header, separator, missing, features, drop, categorical, dates, categories_max } = self;
        vec![
            ("--header or --no-header", format!("{header:?}")),
            ("--separator", format!("{separator:?}")),
            ("--missing", missing.to_string()),
            ("--features", features.join(",")),
            ("--drop", drop.join(",")),
            ("--categorical", categorical.join(",")),
            ("--dates", dates.join(",")),
            ("--max-categories", categories_max.to_string()),
        ]
    }

    /// Returns the role of each column. `names` holds the names of the columns, and `target` is the name or the number
    /// of the target column. `kind_of` returns the kind of a column that neither `categorical` nor `dates` names.
    ///
    /// # Errors
    ///
    /// If an option names a column that does not exist, or if options contradict each other.
    pub(crate) fn column_roles(
        &self,
        names: &[String],
        target: &str,
        kind_of: impl Fn(usize) -> ColumnKind,
    ) -> Result<Vec<ColumnRole>, String> {
        let target = find_column(names, target)?;
        let find =
            |list: &[String]| list.iter().map(|name| find_column(names, name)).collect::<Result<Vec<_>, _>>();
        let (features, drop, categorical) =
            (find(&self.features)?, find(&self.drop)?, find(&self.categorical)?);
        let dates = find(&self.dates)?;
        for (option, list) in [("--features", &features), ("--drop", &drop), ("--dates", &dates)] {
            if list.contains(&target) {
                return Err(format!("{option} names column `{}`, which is the target", names[target]));
            }
        }
        if let Some(&both) = features.iter().find(|index| drop.contains(index)) {
            return Err(format!("both --features and --drop name column `{}`", names[both]));
        }
        let is_used = |index| (features.is_empty() || features.contains(&index)) && !drop.contains(&index);
        for (option, list) in [("--categorical", &categorical), ("--dates", &dates)] {
            if let Some(&unused) = list.iter().find(|&&index| index != target && !is_used(index)) {
                return Err(format!("{option} names column `{}`, which is not used", names[unused]));
            }
        }
        if let Some(&both) = dates.iter().find(|index| categorical.contains(index)) {
            return Err(format!("both --categorical and --dates name column `{}`", names[both]));
        }
        if !(0..names.len()).any(|index| index != target && is_used(index)) {
            return Err("has no column besides the target".into());
        }
        let kind = |index| match index {
            _ if categorical.contains(&index) => ColumnKind::Text,
            _ if dates.contains(&index) => ColumnKind::Dates,
            _ => kind_of(index),
        };
        let column_role = |index| match index {
            _ if index == target => ColumnRole::Target(kind(index)),
            _ if is_used(index) => ColumnRole::Feature(kind(index)),
            _ => ColumnRole::Ignored,
        };
        Ok((0..names.len()).map(column_role).collect())
    }
}

/// Returns whether `name` is the number of a column, and not the text of a cell in the first row `first` of a table. If two
/// cells of the row are equal, they cannot be names, so the number may be equal to a cell.
pub(crate) fn is_column_number(name: &str, first: &ByteRecord) -> bool {
    let cells: BTreeSet<&[u8]> = first.iter().map(<[u8]>::trim_ascii).collect();
    let is_number = name.parse().is_ok_and(|index: usize| index < first.len());
    is_number && (cells.len() < first.len() || !cells.contains(name.as_bytes()))
}

/// Returns the index of the column with the name or number `wanted`.
pub(crate) fn find_column(names: &[String], wanted: &str) -> Result<usize, String> {
    let mut named = names.iter().enumerate().filter(|(_, name)| *name == wanted).map(|(index, _)| index);
    match (named.next(), named.next()) {
        (Some(index), None) => return Ok(index),
        (Some(_), Some(_)) => {
            return Err(format!(
                "has more than one column `{wanted}`; pass the number of the column instead"
            ));
        }
        (None, _) => {}
    }
    wanted.parse().ok().filter(|&index| index < names.len()).ok_or_else(|| {
        let shown: Vec<&str> = names.iter().take(COLUMN_NAMES_SHOWN_MAX).map(String::as_str).collect();
        let more = if names.len() > shown.len() { ", ..." } else { "" };
        format!("has no column `{wanted}`; its columns are {}{more}", shown.join(", "))
    })
}
