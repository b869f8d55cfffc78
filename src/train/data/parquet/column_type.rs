//! The types of Parquet columns, and the cells of a table that their values become.

use ::parquet::basic::{ConvertedType, LogicalType, TimeUnit, Type};
use ::parquet::data_type::Int96;
use ::parquet::schema::types::ColumnDescriptor;
use half::f16;

use super::value::{TypedValue, days_of_int96, days_of_timestamp, integer_from_bytes};
use crate::train::data::column_values::ColumnKind;

/// The maximum number of digits of a decimal.
const DECIMAL_DIGITS_MAX: i32 = 38;

/// How errors describe the content of a column with times of day.
const TIMES_OF_DAY: &str = "times without a date";

/// The type of the values of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ColumnType {
    Boolean,
    SignedInteger,
    UnsignedInteger,
    /// Floating-point numbers of 16 bits.
    Half,
    /// Floating-point numbers of 32 or 64 bits.
    Float,
    Decimal {
        scale: u32,
    },
    Text,
    /// Days since 1970.
    Date,
    Timestamp {
        units_per_second: i64,
    },
    /// Timestamps of 96 bits, which old versions of Spark and Impala write.
    Int96Timestamp,
    /// The column has no values.
    Null,
}

/// A cell that was read from a column. Unlike [`Cell`](crate::train::data::Cell), it owns its text.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum StoredCell {
    Missing,
    Text(Box<[u8]>),
    Typed(TypedValue),
}

impl ColumnType {
    /// Returns the type of a column that is not nested. If the type is not supported, the error describes
    /// the content of the column, for example `times without a date`.
    pub(super) fn of_column(column: &ColumnDescriptor) -> Result<Self, String> {
        let (digits, scale) = (column.type_precision(), column.type_scale());
        match column.logical_type_ref() {
            Some(logical) => Self::from_logical_type(logical, (digits, scale)),
            None if column.converted_type() != ConvertedType::NONE => {
                Self::from_converted_type(column.converted_type(), (digits, scale))
            }
            None => match column.physical_type() {
                Type::BOOLEAN => Ok(Self::Boolean),
                Type::INT32 | Type::INT64 => Ok(Self::SignedInteger),
                Type::INT96 => Ok(Self::Int96Timestamp),
                Type::FLOAT | Type::DOUBLE => Ok(Self::Float),
                Type::BYTE_ARRAY => Ok(Self::Text),
                Type::FIXED_LEN_BYTE_ARRAY => Err("bytes".into()),
            },
        }
    }

    /// Returns the type that the schema declares as a logical type. `digits` is the number of digits of a decimal, and
    /// `scale` is the number of these digits after the point.
    fn from_logical_type(logical: &LogicalType, (digits, scale): (i32, i32)) -> Result<Self, String> {
        match logical {
            LogicalType::Unknown => Ok(Self::Null),
            LogicalType::Integer(integer) if integer.is_signed => Ok(Self::SignedInteger),
            LogicalType::Integer(_) => Ok(Self::UnsignedInteger),
            LogicalType::Float16 => Ok(Self::Half),
            LogicalType::Decimal(_) => decimal_type(digits, scale),
            LogicalType::String | LogicalType::Enum | LogicalType::Json => Ok(Self::Text),
            LogicalType::Date => Ok(Self::Date),
            LogicalType::Timestamp(timestamp) => {
                let units_per_second = match timestamp.unit {
                    TimeUnit::MILLIS => 1_000,
                    TimeUnit::MICROS => 1_000_000,
                    TimeUnit::NANOS => 1_000_000_000,
                };
                Ok(Self::Timestamp { units_per_second })
            }
            LogicalType::Time(_) => Err(TIMES_OF_DAY.into()),
            other => Err(format!("values of the type {other:?}")),
        }
    }

    /// Returns the type that the schema declares as a converted type, the predecessor of logical types. For `digits` and `scale`,
    /// see [`from_logical_type`](Self::from_logical_type).
    fn from_converted_type(converted: ConvertedType, (digits, scale): (i32, i32)) -> Result<Self, String> {
        use ConvertedType as C;
        match converted {
            C::UTF8 | C::ENUM | C::JSON => Ok(Self::Text),
            C::DECIMAL => decimal_type(digits, scale),
            C::DATE => Ok(Self::Date),
            C::TIMESTAMP_MILLIS => Ok(Self::Timestamp { units_per_second: 1_000 }),
            C::TIMESTAMP_MICROS => Ok(Self::Timestamp { units_per_second: 1_000_000 }),
            C::UINT_8 | C::UINT_16 | C::UINT_32 | C::UINT_64 => Ok(Self::UnsignedInteger),
            C::INT_8 | C::INT_16 | C::INT_32 | C::INT_64 => Ok(Self::SignedInteger),
            C::TIME_MILLIS | C::TIME_MICROS => Err(TIMES_OF_DAY.into()),
            other => Err(format!("values of the type {other}")),
        }
    }

    /// Returns the kind of a column with values of this type. Returns `None` for [`Null`](Self::Null), because a column
    /// without values can have any kind.
    pub(super) fn kind(self) -> Option<ColumnKind> {
        match self {
            Self::Boolean | Self::Text => Some(ColumnKind::Text),
            Self::SignedInteger | Self::UnsignedInteger | Self::Half | Self::Float | Self::Decimal { .. } => {
                Some(ColumnKind::Numbers)
            }
            Self::Date | Self::Timestamp { .. } | Self::Int96Timestamp => Some(ColumnKind::Dates),
            Self::Null => None,
        }
    }

    /// Returns the cell of a value that is stored in 32 bits.
    pub(super) fn cell_of_i32(self, value: i32) -> StoredCell {
        match self {
            Self::UnsignedInteger => StoredCell::Typed(TypedValue::Integer(i128::from(value as u32))),
            _ => self.cell_of_i64(i64::from(value)),
        }
    }

    /// Returns the cell of a value that is stored in 64 bits.
    pub(super) fn cell_of_i64(self, value: i64) -> StoredCell {
        StoredCell::Typed(match self {
            Self::UnsignedInteger => TypedValue::Integer(i128::from(value as u64)),
            Self::Decimal { scale } => TypedValue::Decimal { unscaled: value.into(), scale },
            Self::Date => TypedValue::Date(value as f64),
            Self::Timestamp { units_per_second } => {
                TypedValue::Date(days_of_timestamp(value, units_per_second))
            }
            _ => TypedValue::Integer(value.into()),
        })
    }

    /// Returns the cell of a value that is stored as bytes: a text, a decimal or a floating-point number of 16 bits. The
    /// error says what is wrong with the value.
    pub(super) fn cell_of_bytes(self, bytes: &[u8]) -> Result<StoredCell, String> {
        match (self, bytes) {
            (Self::Decimal { scale }, _) => {
                let unscaled = integer_from_bytes(bytes)
                    .ok_or_else(|| format!("a decimal has more than {DECIMAL_DIGITS_MAX} digits"))?;
                Ok(StoredCell::Typed(TypedValue::Decimal { unscaled, scale }))
            }
            (Self::Half, &[low, high]) => Ok(cell_of_f32(f16::from_le_bytes([low, high]).to_f32())),
            _ => Ok(StoredCell::Text(bytes.into())),
        }
    }
}

/// Returns the cell of a number. NaN becomes a missing value.
pub(super) fn cell_of_f32(value: f32) -> StoredCell {
    if value.is_nan() { StoredCell::Missing } else { StoredCell::Typed(TypedValue::Single(value)) }
}

/// Returns the cell of a number. NaN becomes a missing value.
pub(super) fn cell_of_f64(value: f64) -> StoredCell {
    if value.is_nan() { StoredCell::Missing } else { StoredCell::Typed(TypedValue::Double(value)) }
}

/// Returns the cell of a timestamp of 96 bits. The error says what is wrong with the value.
pub(super) fn cell_of_int96(value: Int96) -> Result<StoredCell, String> {
    let words = value.data().try_into().map_err(|_| "a timestamp does not have 96 bits")?;
    Ok(StoredCell::Typed(TypedValue::Date(days_of_int96(words))))
}

/// Returns the type of decimals with `digits` digits, of which `scale` are after the point. If the type is not supported,
/// the error describes the content of the column.
fn decimal_type(digits: i32, scale: i32) -> Result<ColumnType, String> {
    match u32::try_from(scale) {
        Ok(scale) if scale as i32 <= digits && digits <= DECIMAL_DIGITS_MAX => {
            Ok(ColumnType::Decimal { scale })
        }
        _ => Err(format!("decimals with {digits} digits, {scale} of them after the point")),
    }
}
