"""Words in names and values of columns that indicate the meaning of a column, and common formats of times."""

USER = {"user", "users", "uid", "userid", "member", "customer", "visitor", "viewer", "用户", "用户id", "会员"}
TIME = {
    "time", "timestamp", "ts", "date", "datetime", "at", "when", "created", "day", "hour", "epoch",
    "时间", "日期", "时间戳",
}  # fmt: skip
ID = {"id", "ids", "uuid", "guid", "key", "编号"}
EVENT = {"id", "event", "impression", "request", "row", "record", "uuid", "guid", "log"}
"""Names of columns that may contain the id of the event."""
LABEL = {"label", "click", "clicked", "clicks", "target", "y", "converted", "conversion", "is_click", "点击", "标签"}
CODE = ID | {"code", "zip", "zipcode", "postcode", "type", "category", "class", "month", "hour", "day", "weekday", "no"}
"""Names of columns whose integers are codes, not amounts."""
ENTITY = {
    "item", "movie", "film", "product", "sku", "article", "advertiser", "ad", "adgroup", "campaign", "creative",
    "banner", "publisher", "site", "page", "video", "song", "track", "album", "artist", "author", "book", "game", "app",
    "store", "shop", "seller", "merchant", "vendor", "brand", "restaurant", "hotel", "channel", "playlist", "genre",
    "category", "subcategory", "topic", "tag", "group", "cluster", "segment", "city", "country", "region", "state",
    "location", "place", "venue", "device", "browser", "session", "account", "query", "keyword", "商品", "品牌", "广告",
}  # fmt: skip
"""Things that have ids. A column whose name ends in one of these words contains ids, unless it is an amount."""
AMOUNT = {
    "price", "amount", "count", "num", "number", "qty", "quantity", "age", "distance", "duration", "score", "length",
    "size", "temperature", "temp", "lat", "lon", "latitude", "longitude", "rate", "ratio", "cost", "bid", "income",
    "balance", "views", "seconds", "minutes", "weight", "height", "width", "价格", "数量", "年龄",
}  # fmt: skip
MISSING_MARKERS = {"NA", "N/A", "n/a", "null", "NULL", "None", "nan", "NaN", "NAN", "\\N", "?", "-", "#N/A"}
"""Texts that stand for a missing value."""
BOOLEANS = ({"true", "false"}, {"yes", "no"}, {"y", "n"}, {"t", "f"}, {"on", "off"})
"""Pairs of values that are booleans."""
TRUE = {"true", "yes", "y", "t", "on"}
POSITIVE = {
    "positive", "pos", "success", "won", "win", "sold", "bought", "buy", "purchase", "purchased", "paid", "accepted",
    "approved", "churned", "fraud", "spam", "liked", "like", "watched", "installed", "subscribed", "good",
}  # fmt: skip
"""Words in a value that suggest that it is the positive outcome."""
NEGATIVE = {"not", "no", "non", "never", "negative", "neg", "un", "false", "none", "skip", "skipped", "without"}
"""Words in a value that suggest that it is the negative outcome."""
NOT_A_USER = {"agent", "age", "name"}
"""Last words of names, as in user_agent, of columns that do not contain users."""
TIME_FORMATS = (
    "%Y-%m-%d %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d",
    "%d/%m/%Y %H:%M:%S", "%d/%m/%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y",
    "%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %I:%M %p",
    "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y", "%d-%m-%Y %H:%M:%S", "%d-%m-%Y %H:%M", "%d-%m-%Y",
    "%d-%b-%Y %H:%M:%S", "%d-%b-%Y", "%d %b %Y %H:%M:%S", "%d %b %Y", "%b %d, %Y", "%a %b %d %H:%M:%S %Y",
    "%a, %d %b %Y %H:%M:%S %Z", "%d/%b/%Y:%H:%M:%S %z", "%Y年%m月%d日 %H:%M:%S", "%Y年%m月%d日",
)  # fmt: skip
"""The formats of times that are tried in this order, after ISO 8601."""
DIGIT_FORMATS = {8: ("%Y%m%d", "%y%m%d%H"), 10: ("%Y%m%d%H",), 12: ("%Y%m%d%H%M",), 14: ("%Y%m%d%H%M%S",)}
"""Formats of times that consist only of digits, by the number of digits."""
EARLIEST_TIME, LATEST_TIME = 473_385_600, 4_102_444_800
"""The years 1985 and 2100 in seconds; numbers between them may be times."""
